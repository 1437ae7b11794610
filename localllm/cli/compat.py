"""Translate or explain options and commands of llama.cpp and Ollama, so that copied command lines run.

docs/coming-from.md is generated from these tables. Options that localllm has under llama.cpp's own names are declared
with the other options. Names: llama.cpp, tools/cli/README.md (2026); Ollama, docs/cli.mdx (2026).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

_ONE_CARD = "localllm uses one GPU: choose it with --device"
_FILE = "the model file is always memory-mapped"
_CORES = "the operating system assigns cores; use `taskset` or `numactl` to choose them"
_BATCH = "the batch size is chosen automatically"
_POSITIONS = "this command uses the RoPE scaling of the file; change it with `localllm edit --set-metadata`"
_YARN = "YaRN's factors are fixed to the values of its paper"
_GUESSES = "n-gram speculation needs no settings: see --speculate"
_ALWAYS = "requests are always batched continuously, at most --parallel at a time"
_CONNECTIONS = "one thread serves all connections, and keep-alive lines are sent automatically"
_SERVES_ALL = "embeddings and reranking are always available if the model supports them"
_NO_TOOLS = "the server runs no tools: use `localllm chat --tools`"
_PAGE = "the web page at / is always served, without settings"
_CORS = "use --allow-origin ORIGIN, once for each origin"
_BY_REQUEST = "set it in each request; the model file has the defaults"
_NO_TRAINING = "localllm does not train models"
_SEARCH = "use `localllm search` to find passages in files"
_VECTORS = "use `localllm embed --format` for the output format, and --no-normalize for vectors of any length"
_LOG = "there is no log: warnings go to stderr, and --stats prints timings"
_ADAPTER = "this command takes no adapters"
_MEDIA = "localllm supports text and images only"
_PROJECTOR = "the projector in the model's folder is used for images; choose another with --mmproj"
_CACHE = "the prefix cache saves long prompts automatically; see `localllm cache`"
_SAME = "the draft model uses the options of the main model"
_SILENT = "the prompt is never printed: stdout gets the answer only"
_COMPACT = "the KV cache is always allocated as needed"
# Options that do not change answers are ignored with a note. FLAGS have no value, SWITCHES an optional one
# (on, off, auto ...), VALUED always have one.
FLAGS = {
    _ONE_CARD: "-cmoe --cpu-moe -kvo --kv-offload -nkvo --no-kv-offload --op-offload --no-op-offload --no-host "
    "-bs --backend-sampling",
    _FILE: "--mlock --no-mmap -dio --direct-io -ndio --no-direct-io",
    "weights are used in the file's layout": "--repack -nr --no-repack --warmup --no-warmup",
    _COMPACT: "--swa-full -kvu --kv-unified -no-kvu --no-kv-unified",
    _CACHE: "--prompt-cache-all --prompt-cache-ro --cache-prompt --cache-idle-slots --no-cache-idle-slots",
    _PROJECTOR: "--mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload --no-mmproj-offload",
    "nothing is downloaded unless you ask for it": "--offline",
    _LOG: "--log-disable -v --verbose --log-verbose --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps "
    "--log-jsonl --no-log-jsonl",
    "timings are printed with --stats only": "--perf --no-perf --show-timings --no-show-timings",
    "use `localllm tokenize` to see the tokens": "--verbose-prompt",
    _SILENT: "--display-prompt --no-display-prompt --simple-io -sp --special",
    "in a chat, press Alt-Enter for a new line": "-mli --multiline-input",
    "templates are always Jinja": "--jinja --no-jinja --skip-chat-parsing --no-skip-chat-parsing",
    "use `localllm inspect --check` to check every weight": "--check-tensors",
    "progress is always shown on a terminal": "--progress",
    "stdin is read if no text is given": "--stdin",
    _SAME: "--spec-draft-cpu-moe -cmoed --cpu-moe-draft --spec-draft-backend-sampling --no-spec-draft-backend-sampling",
    _ALWAYS: "-cb --cont-batching -nocb --no-cont-batching",
    _SERVES_ALL: "--embedding --embeddings --rerank --reranking",
    _NO_TOOLS: "--no-agent -no-ag --no-ui-mcp-proxy --no-webui-mcp-proxy",
    _PAGE: "--ui --webui",
    "/metrics is always available": "--metrics",
    "/slots does not exist": "--no-slots",
    "each model is loaded on its first request": "--models-autoload --no-models-autoload",
    "set continue_final_message in the request": "--prefill-assistant "
    "--no-prefill-assistant",
    "the chat template decides which earlier reasoning the model sees": "--no-reasoning-preserve",
    "use `localllm perplexity` to measure perplexity": "--no-ppl",
    "lines are wrapped on a terminal only": "--nowordwrap",
}  # fmt: skip
SWITCHES = {
    "flash attention is always on": "-fa --flash-attn",
    "set the environment variable NO_COLOR=1 for no colours": "-co --color --log-colors",
    _ONE_CARD: "-fit --fit",
    "`localllm fit` always prints the memory needed": "-fitp --fit-print",
    _FILE: "-mmp --mmap",
}
VALUED = {
    _ONE_CARD: "-sm --split-mode -ts --tensor-split -mg --main-gpu -ot --override-tensor -ncmoe --n-cpu-moe -fitt "
    "--fit-target -fitc --fit-ctx -ncffn --n-cpu-ffn",
    _FILE: "-lm --load-mode -lzm --lazy-mode",
    _CORES: "--numa -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb "
    "--cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch",
    "prefill and decode use the same threads: see -t": "-tb --threads-batch",
    _BATCH: "-b --batch-size -ub --ubatch-size --mtmd-batch-max-tokens",
    _COMPACT: "-dt --defrag-thold -ctxcp --ctx-checkpoints --swa-checkpoints -cms "
    "--checkpoint-min-step --kv-unified-per-slot",
    _CACHE: "-cram --cache-ram --prompt-cache -sps --slot-prompt-similarity --slot-save-path",
    "only `localllm serve` has it; other commands reuse common prefixes": "--cache-reuse",
    _CONNECTIONS: "--threads-http --sse-ping-interval",
    _GUESSES: "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic --spec-ngram-mod-n-min --spec-ngram-mod-n-max "
    "--spec-ngram-mod-n-match --spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits "
    "--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n "
    "--spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits --spec-ngram-size-n --spec-ngram-size-m "
    "--spec-ngram-min-hits",
    "tags have no effect": "--tags",
    "use --memory to limit the memory of all models": "--models-max",
    "use `localllm map` to answer several prompts concurrently": "-np --parallel",
    "set the environment variable HF_TOKEN": "-hft --hf-token",
    "reasoning is always separated from the answer": "--reasoning-format",
    "a model is unloaded when its command ends": "--keepalive",
    "each test begins with a warm-up run": "--delay",
    "importance matrices are always written as GGUF": "--output-format",
    "principal components of control vectors are computed exactly": "--pca-batch --pca-iter",
    "only a few rows are in memory at a time": "--max-buffer-size",
    "results are saved all the time, so that an interrupted command resumes": (
        "-ofreq --output-frequency --save-frequency"
    ),
    _LOG: "--log-file -lv --verbosity --log-verbosity --log-prompts-dir",
    _SAME: "-td --threads-draft -ngld --gpu-layers-draft --n-gpu-layers-draft -devd --device-draft -ctkd "
    "--cache-type-k-draft -ctvd --cache-type-v-draft -cd --ctx-size-draft --draft --draft-n --draft-max "
    "--draft-min --draft-n-min --spec-draft-n-max --spec-draft-n-min --draft-p-min --draft-p-split "
    "--spec-draft-threads --spec-draft-threads-batch -tbd --threads-batch-draft --spec-draft-cpu-mask -Cd "
    "--cpu-mask-draft --spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-strict --cpu-strict-draft "
    "--spec-draft-prio --prio-draft --spec-draft-poll --poll-draft --spec-draft-cpu-mask-batch -Cbd "
    "--cpu-mask-batch-draft --spec-draft-cpu-range-batch -Crbd --cpu-range-batch-draft --spec-draft-cpu-strict-batch "
    "--cpu-strict-batch-draft --spec-draft-prio-batch --prio-batch-draft --spec-draft-poll-batch --poll-batch-draft "
    "--spec-draft-type-k --spec-draft-type-v --spec-draft-override-tensor -otd --override-tensor-draft "
    "--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft --spec-draft-p-split --spec-draft-p-min "
    "--spec-draft-device --spec-draft-ngl",
    "this command runs on the CPU": "-ngl --gpu-layers --n-gpu-layers -dev --device",
}  # fmt: skip
# Options that are ignored in some commands only.
IGNORED_IN = {
    "chat": {
        "`chat` is always a conversation": "-cnv --conversation -i --interactive -if --interactive-first -ins "
        "--instruct"
    },
    "run": {
        "`run` always gives one answer; use --raw for no chat template": "-no-cnv --no-cnv --no-conversation",
        "`run` always gives one answer": "-st --single-turn",
    },
    "imatrix": {"every chunk fits the context": "--context-shift --no-context-shift"},
    "perplexity": {"every chunk fits the context": "--context-shift --no-context-shift"},
}
# Options with another name in localllm; {} is the value.
EQUIVALENTS = {
    "-hf": ("-m", "hf:{}"), "-hfr": ("-m", "hf:{}"), "--hf-repo": ("-m", "hf:{}"),
    "--context-shift": ("--on-overflow", "shift"), "--no-context-shift": ("--on-overflow", "error"),
    "-md": ("--speculate", "draft:{}"), "--model-draft": ("--speculate", "draft:{}"),
    "--spec-draft-model": ("--speculate", "draft:{}"), "--no-cache-prompt": ("--no-cache",),
    "--ssl-cert-file": ("--ssl-certfile", "{}"), "--ssl-key-file": ("--ssl-keyfile", "{}"),
    "--sleep-idle-seconds": ("--idle", "{}"), "--reasoning-effort": ("--template-var", "reasoning_effort={}"),
    "--usage": ("--help",),
}  # fmt: skip
# Unsupported options that would change the answer.
UNSUPPORTED = {
    _POSITIONS: "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx",
    _YARN: "--yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast",
    "use --rope-scaling instead, for which models were trained": "-gan --grp-attn-n -gaw --grp-attn-w",
    "write a file with other metadata: `localllm quantize --override-kv`": "--override-kv",
    _ADAPTER: "--lora --lora-scaled --control-vector --control-vector-scaled --control-vector-layer-range "
    "--lora-init-without-apply",
    _MEDIA: "--audio --video --video-fps --video-timestamp-interval --video-ffmpeg-dir --tts-lang --tts-speaker-file",
    "the model's family determines the tokens of an image": "--image-min-tokens --image-max-tokens",
    "put the file name after the repository: hf:OWNER/REPOSITORY/FILE.gguf": "-hff --hf-file",
    "use `localllm pull` for models of the Hugging Face hub, and `curl -LO URL` for others": "-mu --model-url -mmu "
    "--mmproj-url -dr --docker-repo --gpt-oss-20b-default --gpt-oss-120b-default --embd-gemma-default "
    "--fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec "
    "--fim-qwen-30b-default --vision-gemma-4b-default --vision-gemma-12b-default",
    "give the file name: hf:OWNER/REPOSITORY/FILE.gguf": "--mtp --dflash --eagle3",
    "use --speculate draft:MODEL with a local model": "-hfd -hfrd --hf-repo-draft --spec-draft-hf --spec-type "
    "--spec-default",
    "use `localllm serve`": "--server-base",
    "distributed inference over RPC is not supported": "--rpc",
    "use `localllm list`": "-cl --cache-list",
    "use `nvidia-smi -L` to list the GPUs, and --device to choose one": "--list-devices",
    "use `localllm completion bash`": "--completion-bash",
    "use `localllm tokenize` to see the tokens": "-ptc --print-token-count",
    "only the default is supported: the second half of each chunk is scored": "--ppl-stride",
    "texts are always read from the beginning: cut the file": "--chunk --from-chunk",
    "use llama-imatrix for statistics": "--show-statistics",
    "use --json-schema '{}' for any JSON": "--format",
    "use `localllm inspect --modelfile`, or /show in `localllm chat MODEL`":
    "--modelfile --parameters --license --template --system",
    "certificates are always verified": "--insecure",
    "the chat template determines it: use --chat-template": "--in-prefix --in-suffix --in-prefix-bos",
    "redirect the answer to a file: > FILE": "--output --output-file -o",
    "use `localllm chat` for a conversation": "-cnv --conversation -i --interactive -if --interactive-first -ins "
    "--instruct",
    "use `localllm --version`": "--version",
    "use `localllm inspect --check` to check every weight": "--check",
    "use `localllm perplexity --save-logits FILE`": "--save-logits",
    "use `localllm serve NAME=MODEL` to serve a model as NAME": "-a --alias",
    "use --api-key-file FILE: other users can see command lines": "--api-key",
    "give the models; without any, all of `localllm list` are served": "--models-dir",
    "use [model.NAME] in config.toml: see `localllm config --help`": "--models-preset",
    "use a reverse proxy: see docs/deploy.md": "--path --api-prefix",
    "only one server can listen on a port": "--reuse-port",
    "use --timeout, which limits the time of an answer": "-to",
    _CORS: "--cors-origins --cors-methods --cors-headers --cors-credentials --no-cors-credentials",
    _NO_TOOLS: "--agent -ag --ui-mcp-proxy --webui-mcp-proxy --tools-runtime --mcp-servers-config --mcp-servers-json",
    _PAGE: "--no-ui --no-webui --ui-config --webui-config --ui-config-file --webui-config-file",
    "GET /props shows the models' properties, which cannot be changed": "--props",
    "use GET /metrics to count requests, and --parallel to limit them": "--slots",
    "only `localllm serve` has it, for /infill; other commands put the suffix after the prefix": "--spm-infill",
    "the chat template determines which earlier reasoning the model sees": "--reasoning-preserve",
    "reasoning that reaches its limit ends with the model's own end tag": "--reasoning-budget-message",
    "the model file determines the attention type": "--attention",
    _VECTORS: "--embd-normalize --embd-output-format --embd-separator --cls-separator",
    _SEARCH: "--context-file --chunk-size --chunk-separator",
    _NO_TRAINING: "-lr --learning-rate -lr-min --learning-rate-min -decay-epochs --learning-rate-decay-epochs -wd "
    "--weight-decay -val-split --val-split -epochs --epochs -opt --optimizer",
    "use `localllm control-vector` to make control vectors": "--positive-file --negative-file --method",
    "it is for llama.cpp's own tests": "--junk --pos -ns --sequences --spec-synth-len --spec-synth-rates "
    "--logits-output-dir --tensor-filter",
    "`localllm bench` has llama-bench's options: -p, -n, -r": "-pps -tgs -npp -ntg -npl",
    "use `localllm perplexity --json`, which prints all figures": "--ppl-output-type",
    "use `localllm perplexity`: `localllm imatrix` computes no perplexity": "--ppl",
    "use `localllm run` for a single answer": "-st --single-turn -no-cnv --no-cnv --no-conversation",
}  # fmt: skip
# Options that are not supported in one command.
UNSUPPORTED_IN = {
    "bench": {"use --json for JSON, --md for a Markdown table": "-o --output -oe --output-err"},
    "create": {"quantize the model first, with `localllm quantize`": "-q --quantize --experimental"},
    "chat": {
        "use -p for the first question, /read FILE to send a file, -sysf for a system message": (
            "-f --file -bf --binary-file"
        )
    },
    "serve": {
        _BY_REQUEST: "-n --predict --n-predict --keep -p --prompt -sys --system-prompt -f --file -sysf "
        "--system-prompt-file -bf --binary-file -e --escape --no-escape -r --reverse-prompt --samplers -s --seed "
        "--sampler-seq --sampling-seq --ignore-eos --temp --temperature --top-k --top-p --min-p --top-nsigma "
        "--top-n-sigma --xtc-probability --xtc-threshold --typical --typical-p --repeat-last-n --repeat-penalty "
        "--presence-penalty --frequency-penalty --dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n "
        "--dry-sequence-breaker --adaptive-target --adaptive-decay --dynatemp-range --dynatemp-exp --mirostat "
        "--mirostat-lr --mirostat-ent -l --logit-bias --grammar --grammar-file -j --json-schema -jf "
        "--json-schema-file --chat-template-kwargs -rea --reasoning --reasoning-budget --reasoning-effort --image",
        _NO_TOOLS: "--tools",
        "the model file determines the pooling": "--pooling",
        "the server speculates with n-grams and the model's own MTP layer": "-md --model-draft --spec-draft-model",
    },
    "tokenize": {
        "tokens are always those of `run --raw`": "--no-bos --no-parse-special",
        "use --count": "--show-count",
    },
}
# Values of llama.cpp and Ollama with another spelling in localllm, by parameter.
EQUIVALENT_VALUES = {
    "device": {"none": "cpu"} | {f"CUDA{number}": f"cuda:{number}" for number in range(16)},
    "think": {"true": "on", "false": "off"},
    "max_tokens": {"-2": "-1"},  # until the context is full, which ends every answer
}
# Options of llm, mods, aichat, fabric and grep, by the command.
SHELL_TOOLS = {
    "run": {
        "use --template NAME; `localllm templates` lists the names": "--pattern --prompt-template",
        "use --image FILE for an image, -f FILE for a text": "-a --attachment --attach --at",
        "use --continue": "--continue-last --last",
        "an answer is always printed as it is generated": "--stream --no-stream -S",
    },
    "search": {
        "use -k N to limit the passages": "--max-count",
        "use -l to list the matching files": "-c --count",
        "words match in all their forms; use grep for patterns": "-E -F -P -w --word-regexp --invert-match",
    },
}
# The option probably meant where localllm's takes a number, by command and option.
NUMBER_HINTS = {
    "run -s": "-s sets the seed; use -sys TEXT for a system message",
    "run -t": "-t sets the thread count; use --template NAME for a named prompt",
    "run -c": "-c sets the context length; use --continue to follow up on the last answer",
}
SWITCH_VALUES = {"on", "off", "auto", "0", "1", "true", "false", "enabled", "disabled"}


class IgnoredOption(NamedTuple):
    """Another program's option that localllm accepts and ignores.

    Attributes:
        values: count of values after the option; -1: one that may be missing.
    """

    reason: str
    values: int


def _index_by_name(groups: Mapping[str, str], values: int) -> dict[str, IgnoredOption]:
    return {name: IgnoredOption(reason, values) for reason, names in groups.items() for name in names.split()}


_LEFT_OUT = _index_by_name(FLAGS, 0) | _index_by_name(SWITCHES, -1) | _index_by_name(VALUED, 1)
_REFUSED = {name: reason for reason, names in UNSUPPORTED.items() for name in names.split()}


def find_ignored(name: str, command: str) -> IgnoredOption | None:
    """Return the entry of an option that this command ignores, or None."""
    return _index_by_name(IGNORED_IN.get(command, {}), 0).get(name) or _LEFT_OUT.get(name)


def explain_unsupported(name: str, command: str = "") -> str:
    """Return what to use instead of another program's option, or ""."""
    of_command = [*SHELL_TOOLS.get(command, {}).items(), *UNSUPPORTED_IN.get(command, {}).items()]
    reason_here = next((reason for reason, names in of_command if name in names.split()), "")
    return reason_here or _REFUSED.get(name, "")


def is_switch(word: str) -> bool:
    """Return whether a word is the value of a switch, or a list of such values, as llama-bench takes."""
    return all(each in SWITCH_VALUES for each in word.split(","))


def is_llama_option(name: str) -> bool:
    """Return whether llama.cpp has an option of this name that localllm does not have."""
    return name in _LEFT_OUT or name in _REFUSED or name in EQUIVALENTS


def format_ignored_warning(options: Sequence[tuple[str, str]]) -> str:
    """Format the warning about ignored options; for a single one, with the reason."""
    if len(options) == 1:
        return f"{options[0][0]} is ignored: {options[0][1]}"
    return f"ignored (no effect): {', '.join(name for name, _ in options)}"


# ---- commands of llama.cpp and Ollama with their counterparts, and synonyms of commands


class CommandAlias(NamedTuple):
    """Another program's command line, and localllm's counterpart.

    Attributes:
        there, here: the command lines.  differs: how the counterpart differs, "" if it does not.
    """

    there: str
    here: str
    differs: str = ""


LLAMA_CPP = (
    CommandAlias("llama-cli -m FILE", "localllm chat FILE", "a conversation with slash commands: /help"),
    CommandAlias("llama-cli -m FILE -p TEXT -st", "localllm run FILE -p TEXT", "stdout gets the answer only"),
    CommandAlias("llama-completion -m FILE -p TEXT", "localllm run FILE -p TEXT --raw", "without the chat template"),
    CommandAlias(
        "llama-cli -hf OWNER/REPO:TYPE", "localllm chat hf:OWNER/REPO:TYPE", "`localllm pull` downloads it first"
    ),
    CommandAlias("llama-quantize IN OUT TYPE", "localllm quantize IN OUT TYPE", "also from a checkpoint's folder"),
    CommandAlias(
        "llama-imatrix -m FILE -f TEXT -o OUT", "localllm imatrix FILE TEXT -o OUT", "resumes where it stopped"
    ),
    CommandAlias(
        "llama-cvector-generator -m FILE", "localllm control-vector FILE OUT", "from the last token of each prompt"
    ),
    CommandAlias("llama-perplexity -m FILE -f TEXT", "localllm perplexity FILE TEXT", "the same figures"),
    CommandAlias("llama-bench -m FILE", "localllm bench FILE", "the same tests"),
    CommandAlias("llama-tokenize -m FILE -p TEXT", "localllm tokenize FILE TEXT", "--ids prints the token ids only"),
    CommandAlias("llama-gguf-split --split IN OUT", "localllm split IN OUT", "the same files"),
    CommandAlias("llama-gguf-split --merge IN OUT", "localllm merge IN OUT", "the same file"),
    CommandAlias("gguf-dump FILE", "localllm inspect FILE --json"),
    CommandAlias("gguf-set-metadata FILE KEY VALUE", "localllm edit FILE --set-metadata KEY=VALUE", "arrays, too"),
    CommandAlias("llama-server -m FILE", "localllm serve FILE", "port 11435; needs `pip install '.[serve]'`"),
)
OLLAMA = (
    CommandAlias("ollama run MODEL", "localllm chat MODEL", "so does `localllm run MODEL` on a terminal"),
    CommandAlias("ollama run MODEL TEXT", "localllm run MODEL TEXT", "stdout gets the answer only"),
    CommandAlias("ollama pull MODEL", "localllm pull MODEL", "from the Hugging Face hub; gemma3:4b is gemma-3-4b"),
    CommandAlias("ollama list", "localllm list"),
    CommandAlias("ollama show MODEL", "localllm inspect MODEL"),
    CommandAlias("ollama rm MODEL", "localllm rm MODEL"),
    CommandAlias("ollama create NAME -f Modelfile", "localllm create NAME -f Modelfile", "a TEMPLATE is recognized"),
    CommandAlias("ollama cp OLD NEW", "localllm cp OLD NEW"),
    CommandAlias("ollama stop MODEL", "localllm stop MODEL", "in a running `localllm serve`"),
    CommandAlias("ollama ps", "curl localhost:11435/api/ps", "only `serve` keeps models loaded"),
    CommandAlias("ollama serve", "localllm serve", "the APIs of OpenAI, Anthropic and Ollama, port 11435"),
)
# Synonyms of commands that users may try.
SYNONYMS = {
    "rm": "remove delete del uninstall erase",
    "cp": "copy alias",
    "stop": "unload",
    "pull": "download get fetch install add",
    "search": "grep rg semgrep sgrep ck similar",
    "ask": "question rag qa answer",
    "embed": "embed-multi vectors embeddings",
    "templates": "patterns fabric snippets",
    "inspect": "show info dump gguf-dump metadata view",
    "list": "ls models find catalogue",
    "run": "generate complete prompt llama-cli main simple query exec",
    "chat": "talk interactive conversation repl cli",
    "quantize": "convert quant llama-quantize quantise convert-hf-to-gguf",
    "tokenize": "tokens llama-tokenize encode tokenise",
    "perplexity": "ppl llama-perplexity",
    "eval": "evaluate lm-eval lm_eval grade score",
    "bench": "benchmark llama-bench speed",
    "imatrix": "llama-imatrix importance",
    "control-vector": "control-vectors cvector cvector-generator llama-cvector-generator steer",
    "split": "gguf-split llama-gguf-split shard",
    "merge": "join concat",
    "verify": "check validate checksum gguf-hash",
    "edit": "set-metadata gguf-set-metadata gguf-new-metadata",
    "config": "settings configure options set env",
    "sessions": "history conversations",
    "serve": "server llama-server api start listen",
    "map": "batch parallel llama-batched",
    "fit": "memory size estimate",
    "warmup": "compile",
}
MISSING_COMMANDS = {
    "ps top": "only `localllm serve` keeps models loaded, and lists them at /api/ps",
    "push login signin signout": "models are files: share them on the Hugging Face hub with `hf upload`",
    "update upgrade": "use `pip install --upgrade localllm`",
    "version": "use `localllm --version`",
    "log logs last": "`localllm run --continue` follows up on the last answer, `localllm sessions` lists conversations",
    "summarize summarise explain commit review translate": "these are prompts: use `localllm run MODEL "
    "--template NAME`; `localllm templates` lists the names",
}


def suggest_command(word: str) -> str:
    """Return the command whose synonym was typed, such as "list" for "ls", or ""."""
    return next((name for name, words in SYNONYMS.items() if word.lower() in words.split()), "")


def explain_missing_command(word: str) -> str:
    """Return what replaces another program's command, or ""."""
    return next((reason for words, reason in MISSING_COMMANDS.items() if word.lower() in words.split()), "")
