"""Commands of llama.cpp and Ollama with their counterparts here, and synonyms of commands."""

from typing import NamedTuple


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
    CommandAlias("llama-server -m FILE", "localllm serve FILE", "port 11435; needs `pip install localllm[serve]`"),
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
