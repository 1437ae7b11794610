"""Options of llama.cpp's programs that mean nothing here, and what to do instead.

Those that do mean something stand beside ours, where the options are. Names: llama.cpp, tools/cli/README.md (2026).
"""

_CARD = "one card is used, which --device names, for the last -ngl layers; leave it out"
_FILE = "not needed: the file is mapped into memory, and read as it is used"
_CORES = "threads stay where the system puts them; `taskset` or `numactl` before localllm chooses cores"
_BATCH = "not needed: how many tokens are read at once is chosen by itself"
_POSITIONS = "positions are scaled as the file says; `localllm quantize --override-kv` writes another file"
_LOG = (
    "there is no log: warnings go to stderr, --stats tells times, and LOCALLLM_DEBUG=1 shows where an error comes from"
)
_ADAPTER = "adapters are not supported: merge them into the model before"
_MEDIA = "not supported: localllm reads text only"
_CACHE = "long prompts are kept on disk by themselves; see `localllm cache`"
_MODEL = "name the model where MODEL stands; `localllm pull --help` tells how one from the hub is named"
_DRAFT = "a smaller model guesses with --speculate draft:MODEL, whose numbers are chosen by themselves"
_CHAT = "`localllm chat` holds a conversation, `localllm run` gives one answer"
_SHIFT = "use --on-overflow shift, or --on-overflow error"
_SILENT = "not needed: the prompt is never shown, and stdout is the answer only"

_GROUPS = {
    _CARD: "-sm --split-mode -ts --tensor-split -mg --main-gpu --list-devices -ot --override-tensor -cmoe --cpu-moe "
    "-ncmoe --n-cpu-moe -kvo --kv-offload -nkvo --no-kv-offload --op-offload --no-op-offload -fit --fit -fitt "
    "--fit-target -fitc --fit-ctx --rpc --no-host -bs --backend-sampling",
    _FILE: "--mlock --mmap --no-mmap -dio --direct-io -ndio --no-direct-io -lm --load-mode",
    _CORES: "--numa -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb "
    "--cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch",
    "reading and writing use the same threads: -t": "-tb --threads-batch",
    _BATCH: "-b --batch-size -ub --ubatch-size",
    "not needed: attention is always computed in one pass": "-fa --flash-attn",
    "not needed: weights are used as they are in the file": "--repack -nr --no-repack --warmup --no-warmup",
    "not needed: the cache is always compact": "-dt --defrag-thold --swa-full -kvu --kv-unified -no-kvu "
    "--no-kv-unified -ctxcp --ctx-checkpoints --swa-checkpoints",
    _CACHE: "-cram --cache-ram --prompt-cache --prompt-cache-all --prompt-cache-ro",
    "several prompts at once: `localllm map`; several answers to one: --n": "-np --parallel",
    _POSITIONS: "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor "
    "--yarn-attn-factor --yarn-beta-slow --yarn-beta-fast -gan --grp-attn-n -gaw --grp-attn-w",
    "`localllm quantize --override-kv` writes a file with other metadata": "--override-kv",
    "use `localllm inspect --check`": "--check-tensors",
    _ADAPTER: "--lora --lora-scaled --control-vector --control-vector-scaled --control-vector-layer-range",
    _MODEL: "-mu --model-url -dr --docker-repo -hf -hfr --hf-repo -hff --hf-file --offline --gpt-oss-20b-default "
    "--gpt-oss-120b-default",
    "set HF_TOKEN in the environment": "-hft --hf-token",
    "use `localllm list`": "-cl --cache-list",
    "use `localllm completion bash`": "--completion-bash",
    _LOG: "--log-disable --log-file --log-colors -v --verbose --log-verbose -lv --verbosity --log-verbosity "
    "--log-prefix --no-log-prefix --log-timestamps --no-log-timestamps --log-prompts-dir",
    "use --stats": "--perf --show-timings",
    "not needed: times are told with --stats only": "--no-perf --no-show-timings",
    "`localllm tokenize` shows a text's tokens": "--verbose-prompt --print-token-count",
    _SILENT: "--display-prompt --no-display-prompt --simple-io -sp --special",
    "not needed: NO_COLOR=1 in the environment switches colours off": "-co --color",
    _SHIFT: "--context-shift --no-context-shift",
    _CHAT: "-cnv --conversation -i --interactive -if --interactive-first -st --single-turn",
    "use --raw, which continues the prompt as it is": "-no-cnv --no-conversation --in-prefix --in-suffix "
    "--in-prefix-bos",
    "not needed: in a chat, Alt-Enter begins a new line": "-mli --multiline-input",
    "not needed: templates are always Jinja": "--jinja --no-jinja --skip-chat-parsing --no-skip-chat-parsing",
    "send the answer to a file: > FILE": "--output --output-file -o",
    _MEDIA: "-mm --mmproj -mmu --mmproj-url --mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload "
    "--no-mmproj-offload --image --audio --video --image-min-tokens --image-max-tokens",
    _DRAFT: "-md --model-draft --spec-draft-model -hfd -hfrd --hf-repo-draft --draft --draft-n --draft-max --draft-min "
    "--draft-n-min --spec-draft-n-max --spec-draft-n-min --draft-p-min --draft-p-split --spec-type --spec-default "
    "-td --threads-draft -ngld --gpu-layers-draft --n-gpu-layers-draft -devd --device-draft -ctkd "
    "--cache-type-k-draft -ctvd --cache-type-v-draft -cd --ctx-size-draft",
    "there is no server; the Python API serves programs": "--server-base",
}  # fmt: skip
_ADVICE = {name: reason for reason, names in _GROUPS.items() for name in names.split()}


def advice(name: str) -> str:
    """What to do instead of llama.cpp's option, "" if it has none of this name."""
    return _ADVICE.get(name, "")
