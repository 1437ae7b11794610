"""Translate or explain options and commands of llama.cpp and Ollama, so that copied command lines run.

docs/coming-from.md is generated from these tables. Options that localllm has under llama.cpp's own names are declared
with the other options. Names: llama.cpp, tools/cli/README.md (2026); Ollama, docs/cli.mdx (2026).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

_ONE_CARD = "one card is used, which --device names"
_FILE = "the file is mapped into memory, and read as it is used"
_CORES = "threads stay where the system puts them; `taskset` or `numactl` chooses cores"
_BATCH = "how many tokens are read at once is chosen by itself"
_POSITIONS = "this command scales positions as the file says; `localllm edit --set-metadata` changes it"
_YARN = "YaRN has the mix, the magnitude and the borders of its paper"
_GUESSES = "what repeats is guessed by itself: see --speculate"
_ALWAYS = "requests are batched continuously, and wait for each other only when --parallel are running"
_CONNECTIONS = "one thread holds all connections, and streams need no pings"
_SERVES_ALL = "embeddings and reranking are served wherever the model makes them"
_NO_TOOLS = "the server runs no tools: `localllm chat --tools` does"
_PAGE = "the page at / is part of the server, and has no settings"
_CORS = "--allow-origin ORIGIN lets the pages of one origin ask; repeat it for more"
_BY_REQUEST = "each request sets it, and the model's file what a request leaves out"
_NO_TRAINING = "localllm does not train models"
_SEARCH = "`localllm search` finds passages of files"
_VECTORS = "`localllm embed --format` says how vectors are written, and --no-normalize that they keep their lengths"
_LOG = "there is no log: warnings go to stderr, and --stats tells times"
_ADAPTER = "adapters are not supported: merge them into the model before"
_MEDIA = "localllm reads text and images"
_PROJECTOR = "the projector beside the model is used when there is an image; --mmproj names another"
_CACHE = "long prompts are kept on disk by themselves; see `localllm cache`"
_SAME = "the model that guesses has the options of the one that answers"
_SILENT = "the prompt is never shown, and stdout is the answer only"
_COMPACT = "the cache is always compact"
# Options that change no answer: they are ignored, with a note. FLAGS have no value, SWITCHES may have one
# (on, off, auto ...), VALUED have one.
FLAGS = {
    _ONE_CARD: "-cmoe --cpu-moe -kvo --kv-offload -nkvo --no-kv-offload --op-offload --no-op-offload --no-host "
    "-bs --backend-sampling",
    _FILE: "--mlock --no-mmap -dio --direct-io -ndio --no-direct-io",
    "weights are used as they are in the file": "--repack -nr --no-repack --warmup --no-warmup",
    _COMPACT: "--swa-full -kvu --kv-unified -no-kvu --no-kv-unified",
    _CACHE: "--prompt-cache-all --prompt-cache-ro --cache-prompt --cache-idle-slots --no-cache-idle-slots",
    _PROJECTOR: "--mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload --no-mmproj-offload",
    "nothing is fetched unless you say so": "--offline",
    _LOG: "--log-disable -v --verbose --log-verbose --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps "
    "--log-jsonl --no-log-jsonl",
    "times are told with --stats only": "--perf --no-perf --show-timings --no-show-timings",
    "`localllm tokenize` shows a text's tokens": "--verbose-prompt",
    _SILENT: "--display-prompt --no-display-prompt --simple-io -sp --special",
    "in a chat, Alt-Enter begins a new line": "-mli --multiline-input",
    "templates are always Jinja": "--jinja --no-jinja --skip-chat-parsing --no-skip-chat-parsing",
    "`localllm inspect --check` reads every weight": "--check-tensors",
    "progress is shown on a terminal": "--progress",
    "without a text, stdin is read": "--stdin",
    _SAME: "--spec-draft-cpu-moe -cmoed --cpu-moe-draft --spec-draft-backend-sampling --no-spec-draft-backend-sampling",
    _ALWAYS: "-cb --cont-batching -nocb --no-cont-batching",
    _SERVES_ALL: "--embedding --embeddings --rerank --reranking",
    _NO_TOOLS: "--no-agent -no-ag --no-ui-mcp-proxy --no-webui-mcp-proxy",
    _PAGE: "--ui --webui",
    "/metrics is always there": "--metrics",
    "there is no /slots": "--no-slots",
    "each model is loaded at its first request": "--models-autoload --no-models-autoload",
    "requests say whether their last message goes on: continue_final_message": "--prefill-assistant "
    "--no-prefill-assistant",
    "the chat template says which thoughts of earlier turns the model reads": "--no-reasoning-preserve",
    "`localllm perplexity` tells how well a text is foreseen": "--no-ppl",
    "lines break between words on a terminal only": "--nowordwrap",
}  # fmt: skip
SWITCHES = {
    "attention is always computed in one pass": "-fa --flash-attn",
    "NO_COLOR=1 in the environment switches colours off": "-co --color --log-colors",
    _ONE_CARD: "-fit --fit",
    "`localllm fit` prints what is needed anyway": "-fitp --fit-print",
    _FILE: "-mmp --mmap",
}
VALUED = {
    _ONE_CARD: "-sm --split-mode -ts --tensor-split -mg --main-gpu -ot --override-tensor -ncmoe --n-cpu-moe -fitt "
    "--fit-target -fitc --fit-ctx -ncffn --n-cpu-ffn",
    _FILE: "-lm --load-mode -lzm --lazy-mode",
    _CORES: "--numa -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb "
    "--cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch",
    "reading and writing use the same threads: -t": "-tb --threads-batch",
    _BATCH: "-b --batch-size -ub --ubatch-size --mtmd-batch-max-tokens",
    _COMPACT: "-dt --defrag-thold -ctxcp --ctx-checkpoints --swa-checkpoints -cms "
    "--checkpoint-min-step --kv-unified-per-slot",
    _CACHE: "-cram --cache-ram --prompt-cache -sps --slot-prompt-similarity --slot-save-path",
    "`localllm serve` has it; other commands reuse what prompts begin with": "--cache-reuse",
    _CONNECTIONS: "--threads-http --sse-ping-interval",
    _GUESSES: "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic --spec-ngram-mod-n-min --spec-ngram-mod-n-max "
    "--spec-ngram-mod-n-match --spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits "
    "--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n "
    "--spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits --spec-ngram-size-n --spec-ngram-size-m "
    "--spec-ngram-min-hits",
    "tags are for people only": "--tags",
    "--memory says how much all models may take": "--models-max",
    "`localllm map` answers several prompts at once": "-np --parallel",
    "HF_TOKEN in the environment tells who you are": "-hft --hf-token",
    "thoughts are always told from the answer": "--reasoning-format",
    "a model is there as long as its command": "--keepalive",
    "a test begins with a run that does not count": "--delay",
    "matrices are written as GGUF": "--output-format",
    "memory holds a few rows at a time anyway": "--max-buffer-size",
    "what is done is kept, and an interrupted command goes on there": "-ofreq --output-frequency --save-frequency",
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
    "this command computes on the processor": "-ngl --gpu-layers --n-gpu-layers -dev --device",
}  # fmt: skip
# Options that are ignored in some commands only.
IN_COMMAND = {
    "chat": {
        "a chat is a conversation anyway": "-cnv --conversation -i --interactive -if --interactive-first -ins "
        "--instruct"
    },
    "run": {
        "`run` gives one answer anyway; --raw leaves the chat template out": "-no-cnv --no-cnv --no-conversation",
        "`run` gives one answer anyway": "-st --single-turn",
    },
    "imatrix": {"every chunk fits the context": "--context-shift --no-context-shift"},
    "perplexity": {"every chunk fits the context": "--context-shift --no-context-shift"},
}
# Options with another name here; {} is the value.
SAME = {
    "-hf": ("-m", "hf:{}"), "-hfr": ("-m", "hf:{}"), "--hf-repo": ("-m", "hf:{}"),
    "--context-shift": ("--on-overflow", "shift"), "--no-context-shift": ("--on-overflow", "error"),
    "-md": ("--speculate", "draft:{}"), "--model-draft": ("--speculate", "draft:{}"),
    "--spec-draft-model": ("--speculate", "draft:{}"), "--no-cache-prompt": ("--no-cache",),
    "--ssl-cert-file": ("--ssl-certfile", "{}"), "--ssl-key-file": ("--ssl-keyfile", "{}"),
    "--sleep-idle-seconds": ("--idle", "{}"), "--reasoning-effort": ("--template-var", "reasoning_effort={}"),
    "--usage": ("--help",),
}  # fmt: skip
# Options that would change the answer, but are not supported.
REFUSED = {
    _POSITIONS: "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx",
    _YARN: "--yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast",
    "use --rope-scaling, which models were trained for": "-gan --grp-attn-n -gaw --grp-attn-w",
    "`localllm quantize --override-kv` writes a file with other metadata": "--override-kv",
    _ADAPTER: "--lora --lora-scaled --control-vector --control-vector-scaled --control-vector-layer-range "
    "--lora-init-without-apply",
    _MEDIA: "--audio --video --video-fps --video-timestamp-interval --video-ffmpeg-dir --tts-lang --tts-speaker-file",
    "images have the size that the model's family gives them": "--image-min-tokens --image-max-tokens",
    "name the file behind the repository: hf:OWNER/REPOSITORY/FILE.gguf": "-hff --hf-file",
    "`localllm pull` brings models of the Hugging Face hub; others, `curl -LO URL` does": "-mu --model-url -mmu "
    "--mmproj-url -dr --docker-repo --gpt-oss-20b-default --gpt-oss-120b-default --embd-gemma-default "
    "--fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec "
    "--fim-qwen-30b-default --vision-gemma-4b-default --vision-gemma-12b-default",
    "name the file: hf:OWNER/REPOSITORY/FILE.gguf": "--mtp --dflash --eagle3",
    "use --speculate draft:MODEL, with a model that is here": "-hfd -hfrd --hf-repo-draft --spec-draft-hf --spec-type "
    "--spec-default",
    "`localllm serve` is the server": "--server-base",
    "other computers cannot help": "--rpc",
    "use `localllm list`": "-cl --cache-list",
    "`nvidia-smi -L` lists cards, --device names one": "--list-devices",
    "use `localllm completion bash`": "--completion-bash",
    "`localllm tokenize` shows a text's tokens": "-ptc --print-token-count",
    "chunks are scored as without it: their second halves": "--ppl-stride",
    "texts are read from their beginning: cut the file": "--chunk --from-chunk",
    "only llama-imatrix computes them": "--show-statistics",
    "--json-schema '{}' asks for any JSON": "--format",
    "`localllm inspect --json` has all metadata": "--modelfile --parameters --license",
    "certificates are always checked": "--insecure",
    "the chat template says what stands around a message: --chat-template": "--in-prefix --in-suffix --in-prefix-bos",
    "send the answer to a file: > FILE": "--output --output-file -o",
    "`localllm chat` holds a conversation": "-cnv --conversation -i --interactive -if --interactive-first -ins "
    "--instruct",
    "`localllm --version` prints it": "--version",
    "`localllm inspect --check` reads every weight": "--check",
    "`localllm perplexity --save-logits FILE` saves them": "--save-logits",
    "`localllm serve NAME=MODEL` serves a model as NAME": "-a --alias",
    "other users can see what was typed: --api-key-file FILE": "--api-key",
    "name the models; without any, all of `localllm list` are served": "--models-dir",
    "[model.NAME] of config.toml has a model's options: see `localllm config`": "--models-preset",
    "a proxy before the server does it: see docs/deploy.md": "--path --api-prefix",
    "one server listens at a port": "--reuse-port",
    "requests have a time limit, --timeout, connections none": "-to",
    _CORS: "--cors-origins --cors-methods --cors-headers --cors-credentials --no-cors-credentials",
    _NO_TOOLS: "--agent -ag --ui-mcp-proxy --webui-mcp-proxy --tools-runtime --mcp-servers-config --mcp-servers-json",
    _PAGE: "--no-ui --no-webui --ui-config --webui-config --ui-config-file --webui-config-file",
    "GET /props shows a model's properties, and nobody changes them": "--props",
    "GET /metrics counts requests, --parallel limits them": "--slots",
    "`localllm serve` has it, for /infill; elsewhere the suffix follows the prefix": "--spm-infill",
    "the chat template says which of the thoughts before the model reads": "--reasoning-preserve",
    "thoughts that reach their limit end as the model ends them": "--reasoning-budget-message",
    "the file has its attention": "--attention",
    _VECTORS: "--embd-normalize --embd-output-format --embd-separator --cls-separator",
    _SEARCH: "--context-file --chunk-size --chunk-separator",
    _NO_TRAINING: "-lr --learning-rate -lr-min --learning-rate-min -decay-epochs --learning-rate-decay-epochs -wd "
    "--weight-decay -val-split --val-split -epochs --epochs -opt --optimizer",
    "control vectors are not made here": "--positive-file --negative-file --pca-batch --pca-iter --method",
    "only llama.cpp's own tests need it": "--junk --pos -ns --sequences --spec-synth-len --spec-synth-rates "
    "--logits-output-dir --tensor-filter",
    "`localllm bench` has the options of llama-bench: -p, -n, -r": "-pps -tgs -npp -ntg -npl",
    "`localllm perplexity --json` prints all figures": "--ppl-output-type",
    "`localllm imatrix` computes no perplexity: `localllm perplexity` does": "--ppl",
    "`localllm run` gives one answer": "-st --single-turn -no-cnv --no-cnv --no-conversation",
}  # fmt: skip
# Options that are not supported in one command.
REFUSED_IN = {
    "bench": {"--json prints JSON, --md a table in Markdown": "-o --output -oe --output-err"},
    "chat": {
        "-p asks first, /read FILE sends a file's text, -sysf makes it the instruction": "-f --file -bf --binary-file"
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
        "the file says how its vectors are pooled": "--pooling",
        "the server guesses by repeated text and the model's own MTP layer": "-md --model-draft --spec-draft-model",
    },
    "tokenize": {"tokens are those of `run --raw`": "--no-bos --no-parse-special", "use --count": "--show-count"},
}
# Values of llama.cpp and Ollama with another spelling here, by the parameter.
SAME_VALUES = {
    "device": {"none": "cpu"} | {f"CUDA{number}": f"cuda:{number}" for number in range(16)},
    "think": {"true": "on", "false": "off"},
    "max_tokens": {"-2": "-1"},  # until the context is full, where every answer ends
}
# Options of llm, mods, aichat, fabric and grep, by the command.
SHELL_TOOLS = {
    "run": {
        "use --template NAME: `localllm templates` lists them": "--pattern --prompt-template",
        "use --image FILE for an image, -f FILE for a text": "-a --attachment --attach --at",
        "use --continue": "--continue-last --last",
        "an answer is always printed as it is generated": "--stream --no-stream -S",
    },
    "search": {
        "-k N is the number of passages": "--max-count",
        "-l lists the files that have such passages": "-c --count",
        "words are found in all their forms; for patterns there is grep": "-E -F -P -w --word-regexp --invert-match",
    },
}
# The option that was probably meant where an option takes a number here, by command and option.
MEANT_BY_TEXT = {
    "run -s": "-s is the seed, -sys TEXT a system message",
    "run -t": "-t is the number of threads, --template NAME a named prompt",
    "run -c": "-c is the length of the context; --continue follows up on the last answer",
}
SWITCH_VALUES = {"on", "off", "auto", "0", "1", "true", "false", "enabled", "disabled"}


class IgnoredOption(NamedTuple):
    """An option that has no effect here; values: number of words that follow it, -1 for an optional one."""

    reason: str
    values: int


def _by_name(groups: Mapping[str, str], values: int) -> dict[str, IgnoredOption]:
    return {name: IgnoredOption(reason, values) for reason, names in groups.items() for name in names.split()}


_LEFT_OUT = _by_name(FLAGS, 0) | _by_name(SWITCHES, -1) | _by_name(VALUED, 1)
_REFUSED = {name: reason for reason, names in REFUSED.items() for name in names.split()}


def find_ignored(name: str, command: str) -> IgnoredOption | None:
    """Return the entry of an option that has no effect in this command, None for other options."""
    return _by_name(IN_COMMAND.get(command, {}), 0).get(name) or _LEFT_OUT.get(name)


def refusal(name: str, command: str = "") -> str:
    """Return what to use instead of another program's option, "" for an unknown option."""
    of_command = [*SHELL_TOOLS.get(command, {}).items(), *REFUSED_IN.get(command, {}).items()]
    reason_here = next((reason for reason, names in of_command if name in names.split()), "")
    return reason_here or _REFUSED.get(name, "")


def is_switch(word: str) -> bool:
    """Return whether a word is the value of a switch, or a list of them, as llama-bench takes."""
    return all(each in SWITCH_VALUES for each in word.split(","))


def is_foreign(name: str) -> bool:
    """Return whether it is an option of llama.cpp that localllm does not have."""
    return name in _LEFT_OUT or name in _REFUSED or name in SAME


def ignored_option_warning(options: Sequence[tuple[str, str]]) -> str:
    """Format the line about options without effect, with the reason for each."""
    if len(options) == 1:
        return f"{options[0][0]} is left out: {options[0][1]}"
    return f"left out, because they mean nothing here: {', '.join(name for name, _ in options)}"


# ---- commands of llama.cpp and Ollama with their counterparts here, and synonyms of commands


class CommandAlias(NamedTuple):
    """A command of another program: its spelling there and here, and what differs."""

    there: str
    here: str
    differs: str = ""


LLAMA_CPP = (
    CommandAlias("llama-cli -m FILE", "localllm chat FILE", "a conversation; commands begin with a slash: /help"),
    CommandAlias("llama-cli -m FILE -p TEXT -st", "localllm run FILE -p TEXT", "stdout is the answer only"),
    CommandAlias("llama-completion -m FILE -p TEXT", "localllm run FILE -p TEXT --raw", "without the chat template"),
    CommandAlias(
        "llama-cli -hf OWNER/REPO:TYPE", "localllm chat hf:OWNER/REPO:TYPE", "`localllm pull` fetches it before"
    ),
    CommandAlias("llama-quantize IN OUT TYPE", "localllm quantize IN OUT TYPE", "also from a checkpoint's folder"),
    CommandAlias(
        "llama-imatrix -m FILE -f TEXT -o OUT", "localllm imatrix FILE TEXT -o OUT", "goes on where it stopped"
    ),
    CommandAlias("llama-perplexity -m FILE -f TEXT", "localllm perplexity FILE TEXT", "the same figures"),
    CommandAlias("llama-bench -m FILE", "localllm bench FILE", "the same tests"),
    CommandAlias("llama-tokenize -m FILE -p TEXT", "localllm tokenize FILE TEXT", "--ids prints numbers only"),
    CommandAlias("llama-gguf-split --split IN OUT", "localllm split IN OUT", "the same files"),
    CommandAlias("llama-gguf-split --merge IN OUT", "localllm merge IN OUT", "the same file"),
    CommandAlias("gguf-dump FILE", "localllm inspect FILE --json"),
    CommandAlias("gguf-set-metadata FILE KEY VALUE", "localllm edit FILE --set-metadata KEY=VALUE", "arrays, too"),
    CommandAlias("llama-server -m FILE", "localllm serve FILE", "port 11435; needs `pip install '.[serve]'`"),
)
OLLAMA = (
    CommandAlias("ollama run MODEL", "localllm chat MODEL", "so does `localllm run MODEL` on a terminal"),
    CommandAlias("ollama run MODEL TEXT", "localllm run MODEL TEXT", "stdout is the answer only"),
    CommandAlias("ollama pull MODEL", "localllm pull MODEL", "from the Hugging Face hub; gemma3:4b is gemma-3-4b"),
    CommandAlias("ollama list", "localllm list"),
    CommandAlias("ollama show MODEL", "localllm inspect MODEL"),
    CommandAlias("ollama rm MODEL", "localllm rm MODEL"),
    CommandAlias(
        "ollama create", "[aliases] and [model.NAME] in config.toml", "defaults of a model; `localllm config`"
    ),
    CommandAlias("ollama ps", "", "nothing runs in the background"),
    CommandAlias("ollama serve", "localllm serve", "OpenAI's, Anthropic's and Ollama's interfaces, port 11435"),
)
# Synonyms of commands that users may try.
MEANT = {
    "rm": "remove delete del uninstall erase",
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
NO_COMMAND = {
    "ps stop top": "nothing runs in the background: a model is there as long as its command",
    "push cp copy login signin signout": "models are files: copy them as others, and share them on the Hugging Face "
    "hub with its own program",
    "create": "a model's defaults stand in config.toml: see `localllm config --help`",
    "update upgrade": "pip install --upgrade localllm",
    "version": "localllm --version",
    "log logs last": "`localllm run --continue` goes on after the last answer, `localllm sessions` lists conversations",
    "summarize summarise explain commit review translate": "these are prompts: localllm run MODEL --template NAME; "
    "`localllm templates` lists them",
}


def suggest_command(word: str) -> str:
    """Return the command for a synonym, "" if there is none."""
    return next((name for name, words in MEANT.items() if word.lower() in words.split()), "")


def no_command(word: str) -> str:
    """Return what replaces another program's command, "" for an unknown command."""
    return next((reason for words, reason in NO_COMMAND.items() if word.lower() in words.split()), "")
