# ruff: noqa: E501 (a pattern stands on one line)
"""What the built-in model knows: its topics, each with one answer and many ways to ask for it.

A line is a pattern: `(a|b|)` is a choice, `{name}` a choice listed in MACROS. The kinds of lines differ in the frames
that guide_text.py puts around them: `ask` lines are whole questions, `tasks` are verb phrases ("how do I …"), `things`
are nouns ("what is …"), `flags` and `commands` are names, `problems` are sentences that complain.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topic:
    """An answer, the patterns that ask for it, and answers to "an example?" and "what is the default?" after it."""

    answers: str | tuple[str, ...]
    ask: str = ""
    tasks: str = ""
    things: str = ""
    flags: str = ""
    commands: str = ""
    problems: str = ""
    example: str = ""
    default: str = ""
    weight: float = 1.0
    chatter: bool = False  # small talk and foreign topics take no fillers such as "in localllm"


MACROS = {
    "answer": "(answer|reply|response|output|generation|text|answer|reply)",
    "answers": "(answers|replies|responses|outputs|results|answers)",
    "model": "(model|llm|language model|ai|ai model|model|model)",
    "models": "(models|llms|language models|ai models|models|models)",
    "file": "(file|model file|gguf|gguf file|model)",
    "computer": "(computer|machine|pc|laptop|system|desktop|box|notebook|computer)",
    "this": "(this|localllm|this program|this tool|this thing|it|this software|this app|the program|the tool)",
    "chat": "(chat|conversation|session|dialog|talk|chat session|discussion)",
    "limit": "(limit|restrict|cap|bound|control|shorten|reduce|set|change|choose)",
    "stop": "(stop|interrupt|abort|cancel|halt|break off|cut short|end|pause|shut up)",
    "leave": "(leave|quit|exit|close|end|get out of|terminate|stop|finish|go out of|escape from)",
    "get": "(get|download|find|obtain|fetch|grab|look for|pick up|acquire)",
    "set": "(set|change|choose|give|specify|pass|define|adjust|control|select|pick|use|configure|modify|tweak)",
    "see": "(see|show|view|display|look at|find out|print|list|get|check|know|read)",
    "make": "(make|create|produce|build|generate)",
    "memory": "(memory|ram|main memory|gb of ram|gigabytes|gigs|gb|memory)",
    "many": "(how much|how many|what amount of|how much)",
    "my": "(my|a|the|some|any|my own)",
    "a": "(a|the|my|one|this|an|)",
    "the": "(the|my|its|that|this|)",
    "sysprompt": "(system prompt|system message|system instruction|instructions|persona|role|character|system text)",
    "slow": "(slow|sluggish|so slow|too slow|very slow|taking forever|lagging|crawling|not fast|painfully slow)",
    "fast": "(faster|quicker|speed up|more speed|better performance)",
    "random": "(random|different|varied|surprising|creative|unpredictable)",
    "same": "(same|identical|reproducible|repeatable|deterministic|exact same|equal|constant)",
    "script": "(script|program|shell script|pipeline|bash script|tool|cron job|batch job|automation)",
    "modelname": "(qwen3-4b|qwen|gemma|gemma-3-4b|llama 3|llama-3.2-1b|mistral|phi|smollm2-135m|tinyllama|qwen3-8b|deepseek|smollm3-3b|{word}-7b)",
    "fetch": "(download|fetch|pull|get|bring|grab|retrieve|obtain|load|transfer|install|load down)",
    "disk": "(disk|hard disk|drive|computer|machine|laptop|ssd|pc|system|box)",
    "gigs": "(4|6|8|12|16|24|32|48|64|128) (gb|gigs|gigabytes|gig|g)( of ram| of memory| ram| memory|)",
    "size": "(1b|3b|4b|7b|8b|12b|13b|14b|27b|30b|32b|70b)",
    "quant": "(q8_0|q4_k_m|q6_k|q5_k_m|q4_0|q3_k_m|iq4_xs|q2_k|8 bit|4 bit)",
    "remove": "(delete|remove|erase|uninstall|get rid of|throw away|throw out|clean up|drop|wipe|discard|rm|trash)",
    "records": "(prompts|questions|lines|records|rows|texts|reviews|sentences|items|entries|examples|documents|inputs)",
    "lots": "(many|hundreds of|thousands of|a lot of|lots of|100|1000|200|2000|several|all my|all the|a bunch of|a list of|a pile of|dozens of)",
    "broken": "(interrupted|stopped|killed|aborted|cancelled|cut off|broken off|cut|terminated|disconnected)",
    "goon": "(go on|continue|resume|carry on|proceed|pick up|keep going|restart)",
    "checkpoint": "(checkpoint|safetensors folder|hugging face folder|hf checkpoint|hugging face checkpoint|safetensors checkpoint|folder with safetensors|pytorch checkpoint|transformers model|hf model|fine-tuned model|finetuned checkpoint|hf folder|safetensors files|model.safetensors)",
    "turn": "(turn|convert|make|transform|change|translate|bring|rewrite|export)",
    "enforce": "(force|restrict|constrain|limit|make|guarantee|ensure|enforce|require|confine)",
    "saved": "(saved|stored|kept|recorded|written to disk|written down|remembered|archived|persisted)",
    "later": "(later|tomorrow|another day|next time|next week|after a restart|when i come back|after closing the terminal|in the evening|on monday)",
    "os": "(windows|windows 10|windows 11|macos|a mac|my mac|a macbook|my macbook pro|an imac|a mac mini|linux|ubuntu|debian|fedora|arch linux|arm|arm64|aarch64|a raspberry pi|my raspberry pi|apple silicon|an m1|an m2|an m3|an m4 mac|an intel mac|wsl|a windows pc|a windows laptop|x86|x86-64|an arm server|a linux server|a chromebook|a phone|android|ios|freebsd)",
    "unlike": "(,|, |, please, |, because |. )",
}

PULL = (
    "localllm pull NAME downloads a model from Hugging Face; localllm list --all shows the names, NAME:Q8_0 is another "
    "quantization, and hf:OWNER/REPOSITORY any other model. After an interruption the same command goes on."
)
FIT = (
    "localllm fit NAME tells whether a model fits the memory of your computer and how fast it may be, before you download "
    "it: it needs the size of the file plus the KV cache, which grows with the context."
)
PLATFORMS = (
    "localllm runs on Linux, on x86-64 and ARM processors; it is meant for macOS and Windows too, but has hardly been tested "
    "on a Mac or on Windows: the README says how far it is. It needs Python 3.11 or newer."
)
CONFIG = (
    "Your own defaults stand in config.toml, in ~/.config/localllm: options for all commands, for one command or for one "
    "model. localllm config shows what holds."
)


def _ended(number: str, word: str, *others: str) -> str:
    """Ways to ask for an exit code: the same for every code, so that its number alone decides."""
    n = "|".join((number, number, word, *others))
    code = f"((exit|return|error|status|result) (code|status|value|number) ({n})|(exit|return|status|error|code|errno|rc|$?) ({n}))"
    program = "(it|localllm|my script|the command|my program|the run|a run|the job|my cron job|the process|the shell|make|run|map|the pipeline)"
    ends = "(returned|exits with|exited with|ended with|ends with|returns|gave|gave me|gives|failed with|stopped with|got|quit with|finished with|came back with|reports|reported|shows|says|died with|terminated with)"
    return f"""
        {code}
        (what is|whats|what does|what about|explain|meaning of|the meaning of|tell me about|what do you mean by|why|why do i get|what did i do wrong when i get) (an |the |){code}( mean| stand for| tell me| say| signify|)
        (what does|what would|whats) (an |the |){code} (mean|stand for|tell me|indicate|signify|imply)( in a script| in localllm| after map| after run|)
        {program} {ends} {code}
        {program} {ends} ({n})
        {program} {ends} ({code}|{n})(, why|, what now|, what went wrong|, what does that mean|, what is wrong|, what happened|. what does it mean|. why|. what is that)
        (why|what does it mean|what happened|what is wrong|what went wrong) (when|if|that) {program} {ends} ({code}|{n})
        (i|we|my script|my colleague|the user) (get|got|see|saw|have|keep getting|receive|received|am getting) (an |the |){code}( from localllm| from the command| from run| in my script| all the time| here|)
        (echo $? |$? |the shell |my terminal )(prints|shows|says|is|gives) ({n})( after localllm| after the command| afterwards|)
        (localllm|the command|it)( just|) (stopped|failed|ended|broke|finished)(, | and )(the |its |)(exit |return |)(code|status|value) (is|was) ({n})
        (when|in which case|under what circumstances) (does|will|do) (it|localllm|i) (return|exit with|end with|get|give|see) ({code}|{n})
        (is|does) {code} (bad|an error|a failure|good|mean failure|mean success|mean an error)
    """


TOPICS: dict[str, Topic] = {
    # --- what localllm is, and getting started -----------------------------------------------------------------
    "about": Topic(
        "localllm runs large language models from GGUF files on your own computer: you can chat with a model, ask it "
        "one question, use it in shell scripts or from Python, and make smaller files.",
        ask="""
        (explain|tell|say|describe)( to me| me|) in (one|a) (sentence|few words|word) what (localllm|it|this program|this tool) (does|is|is for)
        i (found|saw|discovered|have) (localllm|this program|this tool) (on my|at) (work pc|computer|server|work|machine)(, what is it|. whats its purpose|. what does it do|, what is it for)
        (could you|please|) (give|write) me (a|an) (short|brief|) (description|summary|overview|idea) of (localllm|this tool|this program)
        (my (friend|boss|colleague) (told me|talked|said something) about|i (read|heard|stumbled) (about|over|upon)) (localllm|this tool)(,|) (what is it|what does it do|whats that)
        (how would you|can you) (explain|describe|sum up) (localllm|this tool|this program) (to a beginner|in one sentence|to my grandmother|to somebody new|)
        what is (localllm|local llm|this program|this tool|this software|this project)
        what (does|can) (localllm|local llm|this program|this tool|this software) (do|do for me|actually do|offer)
        (what|whats) (is|are|) {this} (good|useful|used|meant|made|there) for
        (what|which) (problem|need) does {this} solve
        (tell me|explain|say something) (something|more|a bit|a little|) about {this}
        what (kind|sort|type) of (tool|program|software|app|thing) is (this|it|localllm)
        what (is|are) the (purpose|point|idea|goal|use|benefit) of (localllm|this tool|this program|this)
        (why|when) (would|should|do) (i|one|anybody|somebody) (use|need|want|install) (localllm|this tool|this program)
        (what|so what) did i (just|) (install|download|start)
        (what|whats) localllm
        localllm (overview|introduction|summary|in short|in a nutshell)
        (describe|introduce|summarize) (localllm|this tool|this program|this project|the software)
        (so|) (what|what on earth) is (all|) this (about|for|thing|thing here)
        what can i (do|use|achieve|build) with (localllm|this tool|this program|this|it)
        i (am|m) new here(,|) what (is|does) (this|localllm|localllm do|this do)
        (features|feature list|main features|use cases) (of localllm|of this tool|)
        """,
    ),
    "commands": Topic(
        "The commands are chat, run, map, serve, list, pull, fit, inspect, quantize, sessions, config and more: "
        "localllm --help lists them, and --help behind one shows its options.",
        ask="""
        (what|which) (commands|subcommands|sub commands) (are there|exist|does localllm have|do you know|can i use)
        (what|which) (commands|subcommands) (does it|does this tool|does the program) (have|know|offer|support|accept)
        (list|show|name|give|tell) (me|) (all|) (the|) (commands|subcommands|available commands)
        (commands|command list|list of commands|available commands|all commands|command overview)
        (how many|what) (different|) (commands|subcommands) (are there|does localllm have)
        (which|what) (things|words|verbs) can i (type|put|write) after localllm
        (what is|whats) the (list|set) of commands
        give me an overview of the (commands|command line|subcommands)
        (what|which) are the (commands|subcommands|main commands|most important commands)
        how is the command line (structured|organized)
        """,
        tasks="see (all|the|a list of) (commands|subcommands)",
    ),
    "help": Topic(
        "Add --help to see what is possible: localllm --help lists the commands, and localllm run --help, for example, "
        "lists all the options of run.",
        ask="""
        (where|how) (are|can i find) (all |)(the |)(flags|options|settings|switches|parameters) (documented|explained|listed|described|written down)
        i do not know (how|where|what) to (start|begin|do|do first)
        (where|how) (do|can) i (find|get|see) (help|the help|documentation|the docs|a manual|the manual|more information)
        (where is|is there|wheres) (the|a|any|some) (manual|documentation|docs|help|readme|reference|man page|guidebook)
        (list|show|tell|give) (me|) (all|) (the|) (flags|options|switches|parameters|arguments|settings)
        (what|which) (flags|options|switches|parameters|arguments|settings) (are there|exist|can i use|does run have)
        (help|i need help|help me|please help|can you help me|i need some help|i need assistance|i am lost|im stuck)
        (how|where) (do|can|should) i (start|begin|learn more|read more)
        (getting started|first steps|quick start|quickstart|usage)
        how do i (use|work with|operate|learn) (localllm|this tool|this program|this software|it)
        (what does|what is|explain) (--help|the help option|the help flag)
        (where|how) can i look up (the|all|) (options|flags|details|usage)
        is there (a|some|any) (list|overview) of (all|the) (options|flags|switches)
        """,
        flags="--help",
    ),
    "install": Topic(
        "You install localllm with pip: it needs Python 3.11 or newer and no compiler, because it compiles its kernels "
        "itself on the first start.",
        ask="""
        (how|where) do i (get|put|bring|set up) (localllm|this tool) (onto|on|on to) (a|my|another) (fresh|new|second|different|) (computer|machine|server)
        (what|which) (steps|commands|packages) (are needed|do i need|must i run) to (install|get|set up) (localllm|it)( running|)
        (is there|do you have) (a|an) (installer|package|setup program|installation guide)
        i (cannot|want to|need to) install (it|localllm)( on my computer| here|)
        (what|which) (version of python|python version|python) (do i need|is needed|is required|does it need|works)
        (does it|do i|will i) need (a|any|some) (c|c++|) compiler
        (requirements|system requirements|prerequisites|dependencies|installation|setup)
        what (do i need|is required|is needed|are the requirements) (to install|for installing|to set up) {this}
        (does it|can it|will it) (work|run) with python (3|3.9|3.10|3.11|3.12|3.13|2)
        (pip install|pip|install|installing|setting up) (localllm|)
        """,
        tasks="""
        (install|set up|setup) (localllm|this tool|this program|this|it) (on my computer|with pip|on a new machine|)
        (update|upgrade|reinstall) (localllm|it|to a newer version)
        """,
    ),
    "get_model": Topic(
        PULL,
        ask="""
        (where|how) (can|could|do) i (pick up|come by|get hold of|lay my hands on) (llama|mistral|qwen|a model|a gguf|gguf models|gemma)
        (what|which) (place|website|source|link) (do you|would you|can you) (recommend|suggest) (for|to get|to download) {models}
        (i am|im) looking for (a|some|the) (good |free |chat |)({models})( to download|)
        (from where|where from)( do i get a model| can i download models|)
        (i do not|i dont) (have|own) (a|any) {models}( yet|)(, where do i get one|, what now| so far|)
        where (do|can|could|should|would|might) (i|one|people|we|you) (get|find|download|obtain|look for) {my} {models}
        where (do|can) (i|one) (get|find|download) (a|some|the) (gguf|gguf file|gguf files|model file|model files|weights)
        where (do|does|did) (the|) {models} come from
        (which|what) (website|site|page|place|source) has (gguf|) {models}
        (where|how) (do|can) i (download|get) (llama|qwen|mistral|gemma|phi|smollm|a chat model|a good model)
        (model|gguf|models) (download|downloads|source|sources)
        i (have no|dont have a|do not have any|need a|want a|am missing a) {model}( yet|)
        (does it|does localllm|do you) come with (a|any) {model}
        (can you|could you|) (recommend|suggest|point me to) (a|some|any) (place|site|website) (for|with) {models}
        (hugging face|huggingface|hf)(?|)
        is there (a|some) (place|site|shop|store|library|hub|zoo|catalog) (for|of|with) {models}
        (can i|how to) (use|load|download|get) (a model|models|files|something) from (hugging face|huggingface|the hub)
        how do i (get|come by|get hold of|get my hands on) {my} {models}
        (what|which) (file|files) (do i|should i|must i) (download|get)
        """,
        tasks="{get} {my} (bigger|better|real|good|new|) {models}( file| files|)",
        example="Search Hugging Face for a model's name and the word GGUF, and download the file whose name ends in "
        "Q4_K_M.gguf.",
    ),
    "load_model": Topic(
        "Give the file's path to a command: localllm chat model.gguf starts a conversation with it, and localllm run "
        'model.gguf -p "Hello" gives one answer.',
        ask="""
        (i have|there is|i saved|i put) (a|the|my) (gguf|model|file) (in my|in the) (downloads folder|downloads|home directory|folder|documents)(, how do i start it|, how do i use it|. what do i type|, how do i run it)
        (what|which) command do i (type|run|need|enter) (to use|for|to start|to load) (my|a|the) (downloaded |own |)(model|gguf|file)
        (i have|i got|i downloaded|ive downloaded|i just downloaded|here is) (a|my|the) (gguf|model|gguf file)(,|) (now what|what now|what next|and now|what do i do with it|how do i start it)
        how do i (tell|show) (localllm|it|the program|you) (which|what) {model} to (use|load|run|take)
        where (do|should|must) i (put|place|store|save|copy) (the|my|a|downloaded|) (gguf|model|model file|gguf file|models)
        can (you|i) (become|be|switch to) (a|the) (bigger|larger|better|smarter) {model}
        how do i (replace|swap|exchange) (you|the built-in model|this tiny model) (with|for|by) (a|another) {model}
        """,
        tasks="""
        (use|load|run|start|open|launch|try|execute) {a} (gguf file|model|model file|bigger model|downloaded model|local file)
        (use|load|try|run|switch to|change to) (another|a different|my own|a larger|a second) {model}
        (change|switch) (the|) model
        (talk|chat|speak) (to|with) (a|another|my own|a bigger|a real|a downloaded) {model}
        """,
    ),
    "which_model": Topic(
        "Choose a model by your memory: its file should take at most about two thirds of your RAM. Bigger models "
        "answer better, smaller ones answer faster.",
        ask="""
        (what|which) (is|would be) a (sensible|good|reasonable|suitable|decent) {model} for (somebody with|me with|a person with|) (an old laptop|a small computer|a weak machine|little memory|8 gb|16 gb of ram)
        (which|what) {model} (should|would|could|do) (i|you|we) (choose|use|take|download|try|pick|run|recommend|suggest)
        (which|what) {model} is (the|) (best|good|right|better|recommended|suitable|most useful)( for me| for my computer|)
        (what|which) (is|are) (a|the) (good|best|decent|recommended) {model}( to start with| for beginners| for chat|)
        (recommend|suggest|advise) (me|) (a|some) (good|) {model}
        (how|what) (big|large|small) (a|of a) {model} (should|can) (i|my computer) (use|take|choose|run|handle)
        (is|are) (a|) (bigger|larger|smaller) {models} (better|worse|smarter|slower|faster)
        (what|which) (size|model size|number of parameters) (should|can) i (choose|use|take|run)
        (any|some) (model|) (recommendation|recommendations|advice|suggestion|suggestions)
        (should|shall) i (use|take|get) (a|the) (7b|8b|3b|1b|13b|70b|small|big) {model}
        """,
        tasks="(choose|decide on|pick|select) (a|the right|a good|the best) {model}",
    ),
    "architectures": Topic(
        "localllm runs models of more than a hundred architectures from GGUF files: Llama, Qwen, Gemma, Mistral, Phi and many "
        "others. localllm inspect model.gguf names a file's architecture.",
        ask="""
        (which|what) (models|architectures|model families|llms|kinds of models|types of models) (are supported|does it support|does localllm support|can it run|does it run|work)
        (does it|can it|does localllm|can localllm|will it) (support|run|work with|handle|load) (llama|llama 3|qwen|qwen2|mistral|gemma|phi|deepseek|smollm|falcon|gpt oss|mixtral|tinyllama)(| models)
        (supported|compatible) (models|architectures|model types|families)
        is (llama|qwen|mistral|gemma|phi|deepseek|my model|every model|this architecture) (supported|compatible)
        (list|show) (the|) supported (models|architectures)
        """,
    ),
    # --- the commands -------------------------------------------------------------------------------------------
    "run": Topic(
        'localllm run gives one answer and exits: localllm run model.gguf -p "your prompt". Text piped to it is added '
        "to the prompt.",
        commands="run",
        ask="""
        (what|which) (command|way|mode) (is|do i use) for (one|single|quick) (questions|answers|prompts)
        (one|a single) (question|answer|prompt) (only|without chat|and exit)
        (which|what) command (gives|prints|produces|makes) (just|only|) (one|a single) {answer}
        (is there|do you have) (a|some) (one shot|oneshot|single shot|non interactive|non-interactive) (mode|command|way)
        (can i|how do i|how to) (use it|ask|run it) without (chatting|a chat|a conversation|interaction|the chat)
        """,
        tasks="""
        (ask|send|pose) (just|only|) (one|a single) (question|prompt)( and exit| and be done| without chatting|)
        (get|print|produce) (just|only|) (one|a single) {answer}( and exit| then quit|)
        (ask something|run a prompt|run a single prompt) from the (command line|shell|terminal)
        """,
        example='localllm run model.gguf -p "Why is the sky blue?" -n 100',
    ),
    "chat": Topic(
        "localllm chat model.gguf starts a conversation in your terminal and shows answers as they are written. "
        "Without a model file you talk with me, the built-in guide.",
        commands="chat",
        ask="""
        (which|what) command (starts|opens|begins) (a|the) {chat}
        (is there|do you have) (a|an) (interactive|chat|conversation) (mode|command|interface)
        (what happens|what do i get|who answers) if i (start|run|use|call) chat without (a|any) (model|file|argument|gguf)
        """,
        tasks="""
        (start|open|begin|have|hold|launch) (a|the|an interactive) {chat}( with a model| in the terminal|)
        (chat|talk|converse)( interactively| in the terminal| in my terminal| in a console)
        """,
        example="localllm chat model.gguf",
    ),
    "run_or_chat": Topic(
        "run gives one answer and exits, which suits scripts; chat keeps a conversation going in the terminal and "
        "remembers what was said.",
        ask="""
        (when|why) (would|should|do) (i|one|you) (use|take|prefer|want) (run|chat) (rather than|instead of|over|and not) (chat|run)
        (what is|whats|explain|tell me) the difference between (run and chat|chat and run|the run and chat commands)
        (how|in what way) (does|do|is|are) (run|chat) (and chat|and run|) (differ|different)( from chat| from run|)
        (run or chat|chat or run|run vs chat|chat vs run|run versus chat)
        (should|when should|when do|why would) i use (run or chat|chat or run|run instead of chat|chat instead of run)
        (compare|comparison of) (run and chat|chat and run)
        """,
    ),
    "inspect": Topic(
        "localllm inspect model.gguf shows what is in a file: architecture, sizes, formats, vocabulary, context, chat "
        "template, and the memory it needs by context length.",
        commands="inspect",
        ask="""
        (which|what) command (shows|tells|prints|describes) (me|) (what is in|details about|information about|the metadata of) {a} {file}
        (how many|what) (parameters|layers|tensors|metadata) (does|are in) (my|the|a|this) {file}( have|)
        (what is|whats) the (architecture|context length|vocabulary size|quantization|format) of (my|the|this|a) {file}
        """,
        tasks="""
        {see} (what is in|whats inside|the details of|the contents of|information about|the metadata of|the architecture of) {a} {file}
        (look into|look inside|examine|analyze|inspect|investigate) {a} {file}
        (find out|see|check) (which quantization|how many layers|how many parameters|which format|which architecture|what context length) {a} (model|file) (has|uses)
        """,
        example="localllm inspect model.gguf, or add --json for a form that programs can read.",
    ),
    "tokenize": Topic(
        'localllm tokenize model.gguf "some text" shows the tokens that a model makes of a text; --json prints them '
        "for other programs.",
        commands="tokenize",
        ask="""
        (can i|how do i|how can i) (see|count|find out) how many tokens (my|a|the|this) (text|prompt|file) (has|is|takes|contains)
        (which|what) command (counts|shows|prints) (the|) tokens
        how many tokens (does|are in|has|is) (my|a|the|this) (text|prompt|sentence|file)( have|)
        """,
        tasks="""
        (count|see|show|print|list|get|find) (the|) (tokens|token ids|number of tokens)( of a text| in my text| of my prompt| in a prompt| of a sentence|)
        (split|break|turn|convert) (a|my|some) (text|sentence|prompt) (into|to) tokens
        """,
        example='localllm tokenize model.gguf "Hello world"',
    ),
    "token": Topic(
        "A token is a piece of text, often a short word or a part of a longer one. Models read and write tokens, and "
        "localllm tokenize shows them.",
        things="(a token|tokens|token|one token)",
        ask="""
        (how long|how big|how many letters|how many characters|how many words) is (a|one) token
        (is|are) (a token|tokens) (a word|words|a letter|the same as words)
        why (do|are|does) (models|llms|everybody|people) (use|talk about|count) tokens
        """,
    ),
    "warmup": Topic(
        "localllm warmup compiles the kernels ahead of time, so that the first real start is quick. Give it a model "
        "file to compile just what that model needs.",
        commands="(warmup|warm up)",
        tasks="""
        (compile|prepare|build) (the|) kernels (ahead of time|in advance|before the first start|beforehand|now)
        (avoid|skip|get rid of) the (compile|compilation|waiting) time (of|at|on) the first (start|run)
        """,
        example="localllm warmup model.gguf",
    ),
    "quantize": Topic(
        "localllm quantize model-f16.gguf Q4_K_M makes a smaller file from a big one. The input is a GGUF file in F32, "
        "F16 or BF16, or a Hugging Face folder.",
        commands="quantize",
        ask="""
        (how do you quantize|how do i quantize|how to quantize|how does one quantize|quantize|quantise|quantizing)( a model| models| a file| it|)
        (how|what) (does|is) (quantizing|the quantizing|the compression of a model) (done|work here)( with localllm|)
        (what|which) (command|call|line) (turns|makes|converts) (a|an|my) (f16|fp16|bf16|big|large) (model|gguf|file) (into|to) (q4_k_m|q8_0|q6_k|a small one|something smaller)
        (my|the|this) (model|file|gguf) (is|has|takes) (14|15|20|30|7|40) (gb|gigabytes)(,| and) (can i|how do i|i want to) (shrink it|make it smaller|compress it|reduce it)
        (which|what) command (quantizes|shrinks|compresses|makes smaller) (a|my|the|) {models}
        (is there|do you have) (a|some) (quantizer|quantization tool|quantize tool|way of compressing models)
        my {model} is too (big|large|huge)( for my computer| for my memory|)
        (does it|can it|can localllm|can this) (quantize|shrink|compress) {models}
        """,
        tasks="""
        (quantize|quantise|compress|shrink|squeeze|pack) {a} {model}( file|)( to q4_k_m| to 8 bits| to five bits| to a smaller size| myself|)
        (make|create|produce|get) (a|the|my) (smaller|compressed|quantized|q4|q4_k_m|q8_0|reduced|lighter) (version|copy|model|file)( of a model| of my model|)
        (make|turn) (a|my|the) {model} (smaller|lighter|into q4_k_m|into a smaller one)
        (reduce|lower|decrease|cut) (the|) size of {a} {model}
        (convert|turn) (f16|fp16|f32|bf16|full precision|half precision) (to|into) (q4|q8|q4_k_m|q8_0|q5_k_m|four bits|fewer bits)
        """,
        example="localllm quantize model-f16.gguf model-q4_k_m.gguf Q4_K_M",
    ),
    "convert": Topic(
        "localllm quantize also takes the folder of a Hugging Face checkpoint with safetensors files: localllm quantize FOLDER "
        "model.gguf Q4_K_M makes a GGUF file of it in one step.",
        ask="""
        (can|may|could) i (use|load|run|take) (pytorch|safetensors|transformers|hugging face) (weights|checkpoints|files|models) (directly|as they are|here|)
        (what|how) (about|with|do i do with) (safetensors|safetensors files|checkpoints|hugging face checkpoints|pytorch weights|a finetuned model)
        (from|out of) (safetensors|a hugging face folder|a checkpoint) to gguf
        i (fine-tuned|finetuned|trained) (a|my own) model(, how do i use it here|, can localllm run it| with transformers, how do i convert it)
        (can|does) (localllm|it|this tool) (read|load|take|open|support|run|convert|use) (safetensors|hugging face folders|pytorch checkpoints|hf checkpoints|safetensor files)
        i (have|downloaded|got) (a|some|the) (safetensors|hugging face folder|checkpoint|hf folder|safetensors file)(, what now|, how do i use it|)
        (safetensors|safetensors to gguf|hf to gguf|hugging face to gguf|convert to gguf)
        """,
        tasks="""
        (convert|turn|transform|change) (a|my|the|some) (safetensors|hugging face|hf|huggingface|pytorch|transformers|fine-tuned|downloaded) (model|folder|checkpoint|file|files|) (to|into) (gguf|a gguf file|a gguf)
        (make|create|build) (a|my own) gguf( file|) (from|out of) (safetensors|a checkpoint|a hugging face folder|a hf model)
        (use|load|run) (a|my|) (safetensors|safetensors file|hugging face folder|checkpoint)
        """,
    ),
    "requantize": Topic(
        "Quantizing a file that is already quantized loses quality, so localllm quantize does it only with "
        "--allow-requantize. Start from an F16 or BF16 file when you can.",
        flags="--allow-requantize",
        ask="""
        (can|may|should|could) i (go|convert|change|turn|quantize) (from|a) (q8_0|q6_k|q8|q5_k_m|q4_k_m) (to|into|down to|file to) (q4_k_m|q4|q3_k_m|q2_k|q4_0|another type)
        (can|should|may) i quantize (a|an) (already quantized|quantized|q8_0|q4_k_m) (model|file)( again| once more|)
        (what about|is it ok) (requantizing|quantizing twice|quantizing again)
        """,
        tasks="(requantize|re-quantize|quantize again) {a} (model|file|quantized model|q8_0 file)",
    ),
    "imatrix": Topic(
        "An importance matrix tells the quantizer which weights matter most, so that a small file keeps more quality. "
        "localllm imatrix model.gguf text.txt -o FILE collects it, and quantize takes it with --imatrix FILE.",
        things="(an imatrix|imatrix|the imatrix|an importance matrix|importance matrix)",
        commands="imatrix",
        flags="--imatrix",
        tasks="(make|create|use|collect|compute) (an|the|my) (imatrix|importance matrix)",
    ),
    "perplexity": Topic(
        "localllm perplexity model.gguf text.txt measures how well a model predicts a text: a lower number is better. "
        "It shows what quantization has cost.",
        things="(perplexity|ppl)",
        commands="perplexity",
        ask="""
        how (good|bad|accurate) is my (quantized|q4|small) (model|file)
        (how much|what) (quality|accuracy) (did i lose|is lost|do i lose|does quantization cost)
        """,
        tasks="(measure|test|compare|evaluate|check) (the|) (quality|perplexity|accuracy|loss) of (a|my|the|two|) (model|models|quantized model|quantization)",
    ),
    "bench": Topic(
        "localllm bench model.gguf measures the speed: tokens per second for reading a prompt (pp512) and for writing "
        "an answer (tg128), with mean and deviation.",
        commands="(bench|benchmark)",
        things="(pp512|tg128|pp512 and tg128)",
        ask="""
        (is there|does it have|do you have) (a|some|any) (benchmark|benchmark command|speed test|way to measure speed)
        (i want|i would like) to (know|see|measure) (how fast|the speed of) (my|the|this|a) (model|computer)( is| runs|)
        (whats|what is|which is) the (speed|performance|throughput) (of my model|of this model|on my machine)
        (how fast|at what speed|how quick) (does|is|will) (my|a|the|this) {model} (run|be|go|run on my computer|on my computer)
        (which|what) command (measures|tests|shows) (the|) (speed|performance)
        (can i|how can i) compare the (speed|performance) of (two|several) (models|machines|files|computers)
        """,
        tasks="""
        (measure|test|benchmark|check|time|find out) (the|) (speed|performance|throughput|tokens per second|how fast it is)( of a model| of my computer| of my model|)
        (benchmark|speed test|performance test|stress test) {a} {model}
        """,
        example="localllm bench model.gguf -r 5 repeats each test five times.",
    ),
    "version": Topic(
        "localllm --version prints the version that is installed.",
        flags="--version",
        ask="""
        (what|which) (version|release) (of localllm|) (is this|is it|do i have|have i installed|is installed|am i using|are you|of localllm do i have)
        (version|version number|localllm version|current version)
        """,
        tasks="{see} (the|my|which) (version|version number|installed version|version of localllm|version is installed)",
    ),
    # --- the flags ----------------------------------------------------------------------------------------------
    "flag_p": Topic(
        'The -p flag gives the prompt on the command line: localllm run model.gguf -p "your question".',
        flags="-p",
        ask="""
        (hand over|give|pass|ask) a (question|prompt) on the command line
        what (is|does) -p( mean| do| for| stand for|)( in localllm run|)
        (where|how) do i (put|write|enter|type|pass) (my|the|a) (prompt|question)( on the command line| for run|)
        (which|what) (flag|option|switch) (takes|holds|is for|sets|gives) the prompt
        """,
        tasks="(pass|give|set|specify|hand over|supply) (a|the|my) (prompt|question)( on the command line| as an argument| to run|)",
        things="(the prompt flag|the prompt option)",
        example='localllm run model.gguf -p "Name three rivers."',
    ),
    "prompt": Topic(
        "A prompt is the text you give to a model, usually a question or a task. You pass it with -p, with -f FILE, "
        "or through a pipe.",
        things="(a prompt|prompt|prompts|prompting)",
    ),
    "flag_f": Topic(
        "The -f flag reads the prompt from a file: localllm run model.gguf -f prompt.txt. You can also pipe a file: "
        'cat notes.txt | localllm run model.gguf -p "Summarize".',
        flags="-f",
        ask="""
        (i have|my prompt is in|the question is in|my question stands in|there is) (a|the) (text |txt |)(file|document|prompt.txt|notes.txt|question.txt)(, how do i use it as a prompt|, how can the model read it|, how do i pass it)
        (from|out of) a (text |)file (as|instead of) (a|the|typing a|typing the) prompt
        (which|what) (flag|option|switch) (reads|takes|loads) (the prompt from|) a (text|) file
        (can|could|does|will|would) (localllm|it|the model|you|this|run) (read|open|load|process|take|use|summarize|summarise|translate|work on|handle|digest|go through) (a|my|some|long|) (file|files|document|documents|txt file|article|report|letter|log|log file|essay|notes|my notes)
        (can i|how do i) (give|feed|pass|hand|send|show) (it|the model|localllm|run) (a|my|some) (document|text file|file|report|article|log file|paper|letter)
        my prompt is (very long|in a file|too long to type|stored in a file)
        """,
        tasks="""
        (read|load|take|get) (the|a|my) (prompt|question|input|text) from (a|my|some) (file|text file|document|txt)
        (summarize|summarise|process|analyze|translate|ask about|ask questions about) (a|my|some) (file|document|text file|article|report|pdf text|log)
        (use|pass|feed|put) (a|my|some) (file|document|text file) as (the|a|) (prompt|input|context)
        """,
        example="localllm run model.gguf -f prompt.txt",
    ),
    "flag_sys": Topic(
        'The -sys flag sets the system prompt, which tells the model how to behave: localllm run model.gguf -sys "Answer '
        'in one sentence." -p "…".',
        flags="-sys",
        ask="""
        (how|where) (can|do) (i|you) (write|enter|pass|state) (a|the|my) (system prompt|system message|general instruction)( for a single run| on the command line| with run|)
        (make|let|have) (it|the model|the ai) (always |)(answer|reply|speak|talk|write) (in rhymes|in french|like shakespeare|politely|as a lawyer|in capital letters)
        (which|what) (flag|option|switch) (sets|gives|changes|is for) the {sysprompt}
        how do i (tell|make|get|instruct) (the|a|) (model|llm|ai) (to|) (behave|act|answer|talk|speak|write) (like a pirate|politely|in one sentence|in a certain way|as an expert|differently|always in french|formally|short)
        (can i|how do i|how can i) (give|assign) (it|the model|the ai) (a|some) (personality|role|character|rules|general instructions|behaviour|behavior)( with run| on the command line|)
        (where|how) do i put (the|my|a) {sysprompt}
        """,
        tasks="""
        {set} (a|the|my|my own) {sysprompt}( for the model| with run| for run| on the command line|)
        (tell|make|instruct) (the|a) model (how to behave|to behave|what it is|who it is|to be brief|to play a role|to follow rules)
        """,
        example='localllm run model.gguf -sys "You are a poet." -p "Describe rain."',
    ),
    "system_prompt": Topic(
        "A system prompt is an instruction that stands before the conversation and tells the model how to behave. Set "
        "it with -sys, or with /system TEXT in a chat.",
        things="(a system prompt|the system prompt|system prompt|system prompts|a system message)",
    ),
    "flag_n": Topic(
        "The -n flag limits the length of the answer in tokens: -n 100 stops after at most 100 tokens. Give a larger "
        "number when answers are cut off.",
        flags="-n",
        things="(the maximum number of tokens|max tokens|max_tokens|the token limit)",
        ask="""
        (the|its|my) {answers} (are|get|come out) (way |much |far |) too (long|short)(, can i shorten them|, how do i change that|, can i limit them| for me|, what can i do|)
        (i want|i need|let|make) (it|the model|the answer) (to |)(write|have|produce|be|give) (at most|no more than|only|up to|less than) (fifty|50|100|200|a hundred|twenty) (tokens|words)
        why does (the|my|its) (answer|reply|text|output) (stop|end) (before (it is|its|it's) (finished|done|complete)|too early|suddenly|so soon|in the middle)
        what is -n (50|100|200|256|500|1000)( for| good for|)
        (can|how do|could) i (have|get|ask for) (a|an|) (shorter|longer|short|brief|two sentence) {answer}
        (what|which) (is the|) (limit|maximum) (for|of) (the|an) (answer length|length of an answer|number of tokens)
        (at most|no more than|only|not more than|exactly) (50|100|200|500|twenty|a hundred) (tokens|words)( please| in the answer| of output|)
        the (answer|text|reply|output) (is|gets|comes out) (far|way|much|) too (long|short)
        (stops|stopped|ends) (too early|too soon|before it is finished|in the middle)
        (how|why) (is|are|does|do) (the|my) (answer|reply|output|text) (so|too) (long|short)
        (which|what) (flag|option|switch|setting) (limits|controls|sets|restricts) (the length|how long the answer is|the number of tokens|how much it writes|the size of the answer)
        (how long|how many tokens) (can|may|will|is) (the|an) (answer|reply|output)( be|)
        (the model|it|the ai) (talks|writes|rambles|babbles|goes on|keeps going|chatters) (too much|forever|on and on|endlessly|without end|for pages)
        (the model|it) (never stops|does not stop|doesnt stop|wont stop) (talking|writing|generating)
        """,
        tasks="""
        {limit} (the length of|how long|the size of|the maximum length of) {the} (answer|answers|reply|replies|output|text|reply is|answer gets|answer is)
        (get|have|make it give|ask for|want) (shorter|longer|brief|long|more complete|short) {answers}
        (limit|set|change|restrict|cap|raise) the (number|maximum|amount) of (tokens|words|new tokens|generated tokens|output tokens)
        (keep|hold) (the|its|my) {answer} (short|brief|to a few sentences|small|under 100 tokens)
        """,
        problems="""
        (the|my|its) {answer} (is|gets|was|got|seems|is being) (cut off|truncated|incomplete|unfinished|cut short|too short|not complete)
        (the|its) {answer} (stops|ends|breaks off|finishes) (too early|too soon|before the end|mid sentence|in the middle|abruptly|suddenly|halfway)
        (it|the model) (stops|quits) (writing|talking|answering) (too early|too soon|halfway|before it is done|in the middle of a word)
        """,
        example='localllm run model.gguf -p "Tell a story." -n 300',
    ),
    "flag_c": Topic(
        "The -c flag sets the context: how many tokens of prompt, conversation and answer fit together, for example "
        "-c 4096. A larger context needs more memory.",
        flags="-c",
        ask="""
        (i want|i need|give me|how do i get) (a|) context (of|with) (2048|4096|8192|16384|32768|many) tokens
        (what|which) (context size|context length|context) (should i|can i|do i) (use|set|choose|take)
        (which|what) (flag|option|switch) (sets|changes|controls|is for) the (context|context size|context length|context window)
        """,
        tasks="""
        {set} (the|a|my|) (context|context size|context length|context window|size of the context|length of the context)
        (increase|raise|enlarge|extend|grow|reduce|lower|shrink|double) the (context|context size|context length|context window)
        (use|get|have) (a|) (larger|bigger|longer|smaller|more) (context|context window)
        (make|let) (the model|it) (remember|keep|see) (more|more text|longer texts|longer conversations|more of the conversation)
        """,
        problems="(it|the model|the ai) (forgets|has forgotten|does not remember|forgot|loses) (what i said|earlier messages|the beginning|the start of the chat|things i said before)",
        example="localllm chat model.gguf -c 8192",
    ),
    "context": Topic(
        "The context is all the text that a model can see at once, counted in tokens: the prompt, the conversation and "
        "the answer. The -c flag sets its size.",
        things="(the context|context|a context|the context window|context length|context size|a context window|the context length)",
        ask="""
        how (much|many words|much text|far back) can (a model|the model|it|an llm) (remember|see at once|keep in mind|see)
        how (long|big|large) (is|can) (the|a) (context|conversation|context window)( be|)
        """,
    ),
    "flag_t": Topic(
        "The -t flag sets the number of threads, for example -t 4. Without it localllm uses the physical cores that "
        "are available to it, which is usually best.",
        flags="-t",
        things="(the threads option|thread count|the number of threads|threads|threading)",
        ask="""
        (use|take|need) (only|just|at most|no more than) (one|two|2|3|4|half) (core|cores|threads|of my cores)
        (does|will) (more|fewer) (threads|cores) (help|make it faster|be better|speed it up)
        (what is|whats|which is) the (best|right|optimal) (number of threads|thread count|value for threads)
        how many (threads|cores|cpus|processors|cpu cores) (does it|does localllm|will it|should i|can i|do i) (use|take|need|occupy|run on|set)
        (is|does) (it|localllm) (multithreaded|multi-threaded|parallel|use all cores|use all my cores|use every core|use multiple cores|use hyperthreads)
        (which|what) (flag|option|switch) (sets|changes|controls) (the|) (threads|number of threads|cores|cpu usage)
        (it|localllm) (uses|takes|eats|hogs) (all|too much of|100 percent of) my (cpu|cores|processor)
        """,
        tasks="""
        {set} (the|) (number of threads|number of cores|threads|thread count|cores|cpu cores)
        (use|run on) (fewer|more|less|all|only two|two|four|8|half of the|all my) (threads|cores|cpus|processors|cpu cores)
        (limit|restrict|reduce|lower) (the|its|) (cpu usage|cpu load|number of cores|use of the processor)
        """,
        default="Without -t localllm uses all the physical cores that are available to it.",
        example='localllm run model.gguf -t 4 -p "Hello"',
    ),
    "flag_temp": Topic(
        "The --temp flag sets the temperature, which is how random the answer is: 0 always takes the most likely "
        "token, 0.8 is the default, higher values are more creative.",
        flags="(--temp|temp|--temp|--temperature)",
        things="(the temperature|temperature|sampling temperature|the temp setting)",
        ask="""
        make (the |my |)(answers|answer|output|model|replies) (more|less) (creative|random|varied|wild|boring)(, how|)
        (how|what) (can i do|do i do|to do) to (make|get) (it|the model|the answers|my model) (more|less) (creative|random|adventurous|strict|sober|playful)
        (the answers|the model|its texts) (are|is) too (boring|random|wild|predictable|creative|dull)
        (which|what) (flag|option|switch) (sets|changes|controls|is for) (the|) (temperature|randomness|creativity)
        (what|which) (temperature|temp|value for temp) (should i use|is best|is good|do you recommend|makes sense)
        (what|how) (does|is) (a|) (high|higher|low|lower) (temperature|temp) (do|mean|like|change|good for)
        (is|can) (temperature|temp) (0|1|0.5|0.7|2|one|two|above 1) (ok|good|too high|too low|possible|be used)
        """,
        tasks="""
        {set} (the|a|) (temperature|temp|randomness|creativity|sampling temperature)
        (make|get|have) (the answers|the model|it|the output) (more|less) (creative|random|wild|boring|predictable|focused|imaginative|varied)
        (increase|raise|lower|reduce) (the|) (temperature|randomness|creativity)
        """,
        default="The default temperature is 0.8.",
        example='localllm run model.gguf --temp 0.2 -p "Hello"',
    ),
    "flag_top_k": Topic(
        "The --top-k flag keeps only the k most likely tokens to choose from at each step. The default is 40.",
        flags="(--top-k|top-k|--top-k|top k|top_k|topk)",
        things="(top-k|top k|top_k|topk|top-k sampling)",
        default="The default of --top-k is 40.",
        example='localllm run model.gguf --top-k 20 -p "Hello"',
    ),
    "flag_top_p": Topic(
        "The --top-p flag keeps the smallest set of most likely tokens whose probabilities add up to p. The default is "
        "0.95.",
        flags="(--top-p|top-p|--top-p|top p|top_p|topp)",
        things="(top-p|top p|top_p|topp|nucleus sampling|top-p sampling)",
        default="The default of --top-p is 0.95.",
        example='localllm run model.gguf --top-p 0.9 -p "Hello"',
    ),
    "flag_min_p": Topic(
        "The --min-p flag drops tokens whose probability is below min-p times that of the most likely token. The "
        "default is 0.05.",
        flags="(--min-p|min-p|--min-p|min p|min_p|minp)",
        things="(min-p|min p|min_p|minp|min-p sampling)",
        default="The default of --min-p is 0.05.",
        example='localllm run model.gguf --min-p 0.1 -p "Hello"',
    ),
    "sampling": Topic(
        "Sampling is how the next token is chosen. localllm can apply penalties, top-k, typical, top-p, min-p and "
        "temperature; the defaults are --temp 0.8, --top-k 40, --top-p 0.95 and --min-p 0.05.",
        things="(sampling|the sampler|a sampler|samplers|sampling parameters|sampler settings|the sampling chain)",
        ask="""
        (what|which) are the (default|standard) (sampling|sampler|generation) (settings|parameters|values|options)
        (what|which) (sampling|sampler) (settings|parameters|methods|options|steps) (are there|does it have|can i use|exist)
        how (is|does it choose|does a model choose|does it pick) the next (token|word)( chosen|)
        in (what|which) order are the samplers applied
        (what is|whats|explain) the difference between (top-p and top-k|top-k and top-p|top-p and min-p|min-p and top-p|top-k and min-p)
        """,
    ),
    "flag_seed": Topic(
        "The --seed flag fixes the random numbers, so that the same prompt gives the same answer again: --seed 42. "
        "With --temp 0 the answer is always the same.",
        flags="(--seed|seed|-s|--seed)",
        things="(a seed|the seed|the random seed|random seed)",
        ask="""
        (how come|why do) (i|we) (never |)(get|see) (the same|different|other|a different|identical) (answer|answers|text|output)( twice| each time| when i ask again|)
        (two|both|my) runs (give|gave|produce) (different|not the same|other) (results|answers|texts)
        (is|are) (it|the output|results|the answers) (reproducible|repeatable|deterministic|always the same)
        why (is|are|do i get) (the|) (answer|answers|output|results|reply|replies) (different|not the same|changing) (every time|each time|on every run|all the time)
        why (do|does) (i|it|the model) (get|give|give me|say|produce) (a different|another|a new) (answer|reply|result) (every time|each time|whenever i ask|for the same question)
        (which|what) (flag|option|switch) (makes|gives|sets) (the output reproducible|reproducible answers|the random seed|the same answer again)
        (is|are) (the|) {answers} (deterministic|reproducible|random|repeatable)
        (the same|same|one) (question|prompt) (gives|has|leads to) (different|many|other) (answers|results|replies)
        """,
        tasks="""
        (get|have|reproduce|repeat|generate) (the|exactly the|) {same} {answer}( again| every time| twice| each time| as before| on every run|)
        (make|keep) (the|its|) {answers} (reproducible|deterministic|repeatable|identical|the same|consistent|constant)
        (set|fix|choose|use|give) (a|the|my own) (random|) seed
        (avoid|remove|get rid of|turn off|switch off|disable) (the|all|) (randomness|random answers|chance|randomness in the answers)
        (reproduce|repeat) (a|an|my) (run|result|answer|experiment)
        """,
        example='localllm run model.gguf --seed 42 -p "Hello"',
    ),
    "greedy": Topic(
        "With --temp 0 decoding is greedy: the most likely token is taken at every step, so the answer is always the "
        "same.",
        things="(greedy|greedy decoding|greedy sampling|greedy search|temperature zero|temperature 0|--temp 0|temp 0)",
        tasks="(use|get|have|turn on|enable) (greedy decoding|greedy sampling|greedy search|the most likely answer)",
    ),
    "penalties": Topic(
        "Repetition, presence and frequency penalties make a model repeat itself less, by lowering the chance of "
        "tokens it has already written. See localllm run --help for their flags.",
        things="(the repetition penalty|repetition penalty|a repetition penalty|presence penalty|frequency penalty|the penalties|repeat penalty)",
        problems="""
        (the model|it|the ai|the answer|my model) (repeats itself|keeps repeating|repeats the same sentence|says the same thing again and again|is stuck in a loop|loops|repeats words|goes round in circles)
        """,
        tasks="(avoid|stop|prevent|reduce|fix) (repetition|repetitions|loops|repeated sentences|the model repeating itself|repeating)",
        ask="""
        (my model|the model|it|the ai) (says|writes|repeats|prints) (the same|one) (sentence|word|thing|line|phrase) (over and over|again and again|all the time|many times|forever|in a loop)
        """,
    ),
    "flag_r": Topic(
        'The -r flag stops the answer as soon as the given text appears in it: -r "END". The stop text is called a '
        "stop sequence.",
        flags="(-r|-r STOP)",
        things="(a stop sequence|a stop string|stop sequences|stop words|a stop word|the stop text|a reverse prompt)",
        ask="""
        (can|how do) i (have|make|let) (it|the model|generation|the answer) (end|stop|finish) (when|once|as soon as|if) (it says|it writes|it reaches|a certain word comes|the word end appears|a blank line comes)
        (which|what) (flag|option|switch) (sets|gives|is for) (a|the) (stop sequence|stop word|stop string|stop text)
        """,
        tasks="""
        (stop|end|finish) (the|an) (answer|output|generation|text) (at|on|after|when it reaches|when it writes|as soon as it says) (a|some|a certain|a given|a particular) (word|text|string|line|phrase|sequence|marker)
        (set|use|define|give) (a|the|my own) (stop sequence|stop string|stop word|stop text)
        """,
        example='localllm run model.gguf -r "###" -p "Hello"',
    ),
    "flag_raw": Topic(
        "The --raw flag sends your prompt to the model as it is, without the chat template, so that the model simply "
        "continues the text.",
        flags="--raw",
        ask="""
        (i want|i would like|how do i|can i) (to |)(try|use|run|test) (a|my|this) base model( without (any |)(chat formatting|chat template|template|chat)|)
        (without|with no) (any |)(chat template|chat formatting|template|formatting)
        (which|what) (flag|option|switch) (turns off|disables|skips|avoids|omits) the (chat template|template)
        (is|are) (the|my) prompt (changed|modified|wrapped|altered|formatted)( by localllm| before it is sent|)
        """,
        tasks="""
        (turn off|disable|skip|avoid|switch off|bypass|not use|ignore|omit|leave out|do without) the (chat template|template|chat format|prompt template)
        (use|run|try|test) (a|) (base model|base models|completion model|completion mode|text completion)
        (let the model|make the model|have it|just) (continue|complete|go on with) (a|my) (text|sentence|story)
        (send|pass|give) (a|the|my) (raw|plain|unformatted|unchanged) (prompt|text)
        """,
        example='localllm run model.gguf --raw -p "Once upon a time"',
    ),
    "template": Topic(
        "A chat template is the pattern in which a model was trained to read a conversation. localllm applies the one "
        "in the file by itself; --raw leaves it out.",
        things="(a chat template|the chat template|chat template|chat templates|chatml|a prompt template|jinja templates)",
        ask="""
        (do i|must i) (need|have) to (write|add|apply|format|set) the (chat template|template|chat format)( myself|)
        (where|which) (does|is) the (chat template|template) (come from|used)
        """,
    ),
    "flag_json": Topic(
        "With --json the answer is printed as one JSON object: the text, the tokens, why it stopped, the counts, the "
        "seed, the model and the timings.",
        flags="--json",
        ask="""
        (does|can) (it|localllm|run) (print|write|show) (the answer as json|json output|its output as json)
        (can|could) (i|a program|my script|another tool) (get|read|parse|receive) (the answer|the result|it) (as|in) (json|structured form)
        (which|what) (flag|option|switch) (prints|gives|makes|produces) json
        (what|which) (fields|keys|values|data) (are|does|is) (in|inside) the json( object| output|)( have|)
        (can|does|could) (it|localllm|run) (print|output|write) (its answer as |the answer as |the result as |)json
        (json output|print json|output as json|machine readable output|--json output)
        (is there|do you have) (a|some|any) (machine readable|machine-readable|json) (output|output format)
        """,
        tasks="""
        (get|print|have|output|receive|write|return|want) (the|an|my|) (answer|answers|output|result|results|reply) (as|in|in form of) (json|a json object|machine readable form|structured form|json format)
        (parse|read|process|use) (the|its|) (output|answer|result|results) (in|with|from) (another program|a program|a script|jq|code|my software|a different tool)
        """,
        example='localllm run model.gguf -p "Hello" --json',
    ),
    "flag_stats": Topic(
        "With --stats, run also reports its timings on stderr: how long loading, the prompt and the answer took, and "
        "the tokens per second.",
        flags="--stats",
        things="(the statistics|the timings)",
        ask="""
        how do i (see|get|show|print) (the |)(timing|timings|timing information|statistics) (after|of|for) (a|the) (run|answer)
        (is there|do you have) (a|some|any) (way to see|option for|flag for) (timings|statistics|how long it took)
        (which|what) (flag|option|switch) (shows|prints|reports) (the|) (timings|statistics|stats|timing|durations)
        how (long|many seconds) did (it|the answer|the prompt|loading|my last run) take
        """,
        tasks="{see} (the|) (timings|statistics|stats|timing information|how long it took|how long an answer took|how long loading takes|the time it took)( of a run|)",
        example='localllm run model.gguf -p "Hello" --stats',
    ),
    "pipe": Topic(
        'Text piped to run is appended to the prompt: cat notes.txt | localllm run model.gguf -p "Summarize". Only the '
        "answer goes to stdout, so it also fits into shell scripts.",
        things="(stdin|standard input|piping|pipes|a pipe)",
        ask="""
        (can|how do) i (combine|use|connect) (it|localllm|run) with (grep|cat|other unix tools|git|curl|find|another command|a pipe)
        (what|how) about (unix pipes|pipes|stdin|shell scripts|scripting)
        (can|does) (it|localllm) fit (into|in) (a|my) (pipeline|shell script|makefile)
        (can|does) (it|localllm|run) (read|take|accept|handle|work with|support) (from|) (stdin|standard input|pipes|a pipe|piped text)
        (what|which) (goes|is written|is printed) (to|on) (stdout|stderr|standard output)
        (does it|can it|is it possible to) (work|be used|run) in (a|) (shell|bash) (scripts|script|pipelines|pipeline)
        """,
        tasks="""
        (pipe|send|feed|stream|redirect) (text|a file|something|data|the output of a command|another program|my notes|input) (into|to|in|through) (it|localllm|run|the model|this tool)
        (use|call|run) (it|localllm|this|a model) (in|from|inside) (a|my) {script}
        (redirect|save|write|store) (the|its|an) (answer|output|reply|result) (to|into|in) a (file|text file)
        """,
        example='git diff | localllm run model.gguf -p "Describe this change."',
    ),
    # --- inside a chat ------------------------------------------------------------------------------------------
    "ctrl_c": Topic(
        "Ctrl-C stops the answer that is being written and keeps what was said so far; the chat goes on. To leave, use "
        "Ctrl-D or /exit.",
        ask="""
        what (does|will) (ctrl-c|control-c|ctrl c|control c|ctrl+c) do
        (the|this|its) (answer|reply|text) (is|gets|runs) (boring|too long|wrong|useless)(, how do i stop it|, can i stop it|, i want to stop it|. stop)
        (how|can i) (break|cut) (it|the answer|the model) (off|short)
        (i want|how do i get) (it|the model|the answer) to stop( right now| in the middle| early| now|)
        (what|whats) (does|is|happens with|happens on|happens when i press|happens if i press) (ctrl-c|ctrl c|ctrl + c|control-c|control c|^c|strg c|ctrl+c)( do| for|)
        (ctrl-c|ctrl c|control-c|^c|ctrl+c)
        (which|what) key (stops|interrupts|cancels|ends) (the|an) {answer}
        (the|its) {answer} is too long(,|) (how do i stop it|can i stop it|how to interrupt it)
        it (is still|keeps|does not stop|wont stop) (writing|talking|answering|typing|generating)(,|) how do i (stop|interrupt) it
        """,
        tasks="""
        {stop} (the|an|a long|the current|a running) {answer}( while it is written| in the middle| early|)
        (make|get) it (stop|shut up|be quiet|stop talking|stop writing)
        (stop|interrupt) (the model|the ai|it|you|generation|the bot)( while it is talking| while it is writing| in the middle|)
        """,
    ),
    "leave": Topic(
        "Type /exit or press Ctrl-D to leave the chat.",
        ask="""
        (how can i|how do i|how to|i want to|let me|can i) (quit|exit|leave|go|get out|stop|finish)( here| now| this|)
        what (does|will) (ctrl-d|control-d|ctrl d|control d|ctrl+d) do
        (what|which) (do i|should i|must i) (type|press|enter|do) (to (leave|quit|exit|end it|close it|go|finish)|when i am done|at the end|to get back to the shell)
        (i am|im|we are) (done|finished|through)( here| with this| for today|)(, how do i leave|, how do i quit|, what do i press|)
        (what|whats) (does|is|happens with|happens when i press|happens if i press) (ctrl-d|ctrl d|ctrl + d|control-d|control d|^d|ctrl+d)( do| for|)
        (what|whats) (does|is|happens with|happens when i type) (/exit|slash exit|/quit|exit)( do| for|)
        (ctrl-d|ctrl d|control-d|^d|ctrl+d|/exit|/quit|exit|quit|q|:q)
        (which|what) (key|command) (leaves|ends|closes|quits|exits) (the|a) {chat}
        (how do i|how can i|let me|i want to|how to) (go|get) (back to|to) (my|the) (shell|prompt|terminal|command line)
        i (want to stop|want to leave|want out|have to leave|must close this|am finished)(, how|, what do i type|, what do i press)
        """,
        tasks="{leave} (the|this|a|my) (chat|conversation|program|session|app|tool)",
    ),
    "slash": Topic(
        "In a chat you can type /help for help, /undo and /retry to take back or repeat, /clear to forget the conversation, "
        "/system TEXT to set the system prompt, and /exit to leave.",
        ask="""
        (what|which) (else |)(can i|do i|may i) (type|enter|do|use) (in|inside|during|within) (the|a|this) chat (besides questions|apart from questions|other than questions|)
        (are there|do you have) (special|any|other|some) commands (in|inside|during) (the|a) chat
        (what|which) (commands|slash commands|things) (can i type|can i use|are there|work|do i have) (in|inside|during|within) (the|a) {chat}
        (what|which) (slash commands|commands with a slash) (are there|exist|do you know)
        (slash commands|chat commands|commands in chat|/help|slash)
        (what|whats) (does|is|happens with|happens when i type) (/help|slash help)( do| for|)
        (list|show|tell me) (the|all|) (slash commands|chat commands|commands of the chat)
        """,
        things="(slash commands|the slash commands|/help)",
    ),
    "clear": Topic(
        "Type /clear in the chat: it forgets the conversation so far, and you start anew.",
        ask="""
        (i want|i would like|let us|can i have|give me) (to start |)(a|) (new|fresh|clean|another|different) (conversation|chat|topic|session|start)
        (new topic|next topic|different topic|other subject|clean slate)
        (what|whats) (does|is|happens with|happens when i type) (/clear|slash clear|clear)( do| for|)
        (/clear|slash clear|clear|reset|start over|new chat|new conversation|forget everything)
        (please|can you|could you|) (forget|erase|delete|wipe|clear|ignore) (everything|all of that|what i said|this conversation|our conversation|the history|your memory|the chat so far)
        (i want to|lets|let us|can we) (start over|begin again|start again|start from scratch|change the topic completely|restart)
        """,
        tasks="""
        (clear|reset|delete|erase|wipe|forget|drop|empty|restart) (the|this|my|our|all of the|) (chat|conversation|history|context|memory|chat history|messages|session)
        (start|begin|open) (a|) (new|fresh|clean|empty|another) (chat|conversation|session|topic)
        (start over|start again|begin again|start anew|start from scratch)( in the chat| without leaving|)
        """,
    ),
    "slash_system": Topic(
        "Type /system TEXT in the chat to set the system prompt, for example /system Answer in one sentence.",
        ask="""
        (what|whats) (does|is|happens with|happens when i type) (/system|slash system|/system text)( do| for|)
        (/system|slash system)
        """,
        tasks="{set} the {sysprompt} (in|inside|during|within|while in|in the middle of) (a|the|my) {chat}",
        things="/system",
    ),
    "history": Topic(
        "A chat remembers what was said until you leave or type /clear. Only the new tokens of each turn are processed, "
        "so long conversations stay quick.",
        ask="""
        (what|how much) (did i|have i) (say|said|ask|asked|tell you) (before|first|at the beginning|earlier)
        (is|will) (what i said|the conversation|my first question) (remembered|kept|forgotten|lost)
        (does|do|will|can) (it|the model|you|localllm|the chat) (remember|keep|know|recall) (what i said|our conversation|the conversation|earlier messages|previous messages|the history|my last message|what was said before)
        (do|does) (you|it|the chat) have (a|any) memory
        (is|does) the (chat|conversation|history) (remembered|kept|get longer and slower|become slower)
        does (it|the chat|a long conversation) (get|become) slower (over time|the longer we talk|with every message)
        """,
    ),
    # --- models by name, many prompts, forms, sessions, computers -------------------------------------------------
    "pull": Topic(
        PULL,
        commands="(pull|localllm pull|the pull command)",
        tasks="(download|fetch|pull|bring) (a|the|some|another) (model|gguf|known model|model by name)( from hugging face| from the hub|)",
        ask="""
        (what|which) command (downloads|fetches|brings|pulls) (a model|models|gguf files)
        (can|does) (localllm|it) (download|fetch|pull) (models|a model|gguf files) (by itself|for me|from hugging face|)
        (how do i|can i) (get|pull|download) (another|a different|the q8_0) (quantization|quant|version) (of a model|of it|)
        """,
    ),
    "fit": Topic(
        FIT,
        commands="(fit|localllm fit|the fit command)",
        tasks="(find out|tell|see|know|check) (if|whether) (a|the|this) model (fits|will fit|is too big|runs here)( into my memory| before downloading|)",
        ask="""
        (will|does|would) (a|the|this) (model|7b|70b|13b model) (fit|run) (in|into|on) (my|the) (memory|ram|computer|machine)
        (is there|which is the) (a|) command (that|to) (tells|estimates|tell|estimate) (the memory|how fast|if) a model (needs|will be|fits)
        (how fast|how big) (will|would) (a|the) model be (here|on this machine|on my laptop) before i (download|pull|get) it
        """,
    ),
    "list": Topic(
        "localllm list shows the models that are on this computer, localllm list --all also those that localllm knows by "
        "name, and localllm rm NAME removes one from the disk.",
        commands="(list|rm|localllm list|localllm rm|the list command)",
        tasks="(see|list|show|find|remove|delete) (the|my|all|all the|) (models|downloaded models|pulled models|models i have)( on disk|)",
        ask="""
        (which|what) models (do i have|are here|are on my disk|did i download|are installed|does localllm know)
        (how|where) do i (see|find|list|look up) (the names of models|known models|models by name|available models)
        (how do i|can i) (delete|remove|uninstall|get rid of) (a model|models|a downloaded model) (again|)
        """,
    ),
    "map": Topic(
        "localllm map model.gguf questions.jsonl -o answers.jsonl answers every line of a file, plain text or JSON, with a "
        "line of JSON each; started again with the same -o, it goes on where it stopped.",
        commands="(map|localllm map|the map command)",
        tasks="(answer|ask|process|run) (many|a lot of|hundreds of|all the|a file of) (prompts|questions|lines|records)( at once| in a batch|)",
        ask="""
        (can|does) (localllm|it) (do|run|have) (batches|batch jobs|batch processing|many prompts at once)
        i have (a|one) (file|list|csv) (of|with) (questions|prompts|many lines)(, how do i ask them all|, can i process it|)
        (what|which) (format|kind of file) (does|should) (the|) (input of map|map input|a batch) (have|need)
        (does|will) (map|the batch) (go on|continue|resume) (after|when) (an interruption|ctrl-c|it was stopped)
        """,
    ),
    "schema": Topic(
        '--json-schema FILE makes every answer JSON by a schema, --grammar takes GBNF such as root ::= "yes" | "no", and '
        "--regex takes a regular expression that the answer must match.",
        flags="(--json-schema|--grammar|--regex|-j)",
        tasks="(force|limit|restrict|constrain) (the|an|its) (answer|output) to (json|a schema|yes or no|a grammar|a pattern|a format)",
        things="(json schemas|structured output|gbnf|constrained output|a grammar for the answer)",
        ask="""
        (can|does) (localllm|it) (do|support|have) (structured output|json schemas|grammars|gbnf|regular expressions|json mode)
        (how do i|can i) (get|make) (valid|guaranteed|only|strict) json( by a schema| out of it|)
        (how do i|can i) (make it|let it) (say|answer) only (yes or no|a number|a date|one of some words)
        """,
    ),
    "sessions": Topic(
        "localllm chat --session NAME keeps a conversation in a file and goes on with it later, --continue takes the latest; "
        "localllm sessions lists them, shows one or removes one.",
        flags="(--session|--continue)",
        commands="(sessions|localllm sessions|the sessions command)",
        tasks="(save|keep|store|resume|continue|go on with) (a|the|my|yesterdays|an old) (chat|conversation|session)( for later| tomorrow|)",
        ask="""
        (where|how) (are|is) (my|the|old) (chats|conversations|sessions|chat) (saved|kept|stored|listed)
        (can i|how do i) (go back to|reopen|continue|load) (my|an|the) (last|old|earlier|saved) (chat|conversation|session)
        (is|are) (a chat|conversations|chats) (saved|kept|written to disk) (by default|automatically|)
        """,
    ),
    "platforms": Topic(
        PLATFORMS,
        things="(supported platforms|supported operating systems|the platforms|operating systems)",
        ask="""
        (does|will|can) (localllm|it|this) (run|work) on (windows|linux|macos|a mac|arm|a raspberry pi|apple silicon|windows 11|ubuntu|m1|m2)
        (which|what) (platforms|operating systems|systems|computers) (are supported|does it support|does it run on|can i use)
        (is there|do you have) (a|) (windows|mac|macos|linux|arm) (version|build|release|port)
        """,
    ),
    "elsewhere": Topic(
        "Options have llama.cpp's names, so a copied command line runs: llama-cli is localllm chat or localllm run here, and "
        "ollama run MODEL is localllm chat MODEL. The page Coming from llama.cpp or Ollama has the rest.",
        ask="""
        (i come from|i used|i know|what about) (ollama|llama.cpp|llama-cli)(, what is different|, what is the same here|)
        (what|which) is the (equivalent|counterpart|same) (of|for|as) (ollama run|llama-cli|ollama pull|llama-quantize|ollama)
        (do|are) (llama.cpp|llama-cli) (options|flags|arguments) (work|the same|understood|known)( here|)
        """,
    ),
    # --- files, formats, memory ---------------------------------------------------------------------------------
    "gguf": Topic(
        "GGUF is a file format for language models: one file holds the weights, the vocabulary, the chat template and "
        "the settings of a model.",
        things="(gguf|a gguf file|a gguf|gguf files|the gguf format|.gguf|ggufs)",
        ask="""
        (what is|whats) (the deal with|the story with|special about|so good about) (gguf|gguf files|the gguf format)
        (which|what) (file |)format (do|must|should|does) (models|a model|my model|files) (need to |)(have|be in|use)
        what (is in|is inside|is stored in|does it contain|belongs to) (a|the|) (gguf|gguf file|.gguf file)
        what does (a|the) (gguf|gguf file) (contain|hold|include|store|consist of)
        (what|which) (file format|format|file formats|formats|file type|kind of file) (does it|does localllm|do models|can it) (use|read|need|expect|open|have)
        what does gguf (stand for|mean)
        """,
    ),
    "split": Topic(
        "A model in several files, named like model-00001-of-00003.gguf, works too: keep them in one folder and give "
        "the first file.",
        things="(split files|a split model|split gguf|a split gguf file|00001-of-00003)",
        ask="""
        (my|the|this) (model|download|gguf) (consists of|has|is made of|comes in|is in) (two|three|four|several|many|5) (gguf |)(files|parts|pieces)(, what do i do|, how do i load it|, is that ok|, which one do i use|)
        (my|the) (model|gguf|download) (is|comes|came) (split|divided|in several parts|in many files|in several files|in pieces)( into parts|)
        (can|does|how do) (it|localllm|i) (load|read|support|handle|open|use) (split|multi-part|multipart|several|sharded) (files|ggufs|gguf files|models)
        (why are there|there are|i have) (several|many|three|two|multiple) (files|gguf files|parts) (for|of) one model
        do i (have|need) to (merge|join|combine) (split|the|several) (files|parts|gguf files)
        """,
        tasks="(merge|join|combine|load|use|open) (split|several|multiple|sharded) (files|gguf files|parts|ggufs)",
    ),
    "quantization": Topic(
        "Quantization stores a model's weights with fewer bits: the file gets smaller and the answers come faster, for "
        "a little loss of quality.",
        things="(quantization|quantisation|a quantized model|quantized|quantized models|a quant|quants|model quantization)",
        ask="""
        (why|what for) (are|do people|does one|should) (models |)(quantized|quantize models|quantize)( in the first place| at all|)
        (why|what for) (should|would|do|are) (i|people|models|we) (quantize|quantized|use quantization)( models| a model|)
        (does|do) (quantization|quantizing|quantized models) (hurt|lose|reduce|cost|have worse) (quality|the quality|accuracy|answers)
        what (are|is) the (advantages|benefit|benefits|disadvantages|cost|downside) of (quantization|quantizing|quantized models)
        how does quantization work
        """,
    ),
    "q4_k_m": Topic(
        "Q4_K_M stores about five bits per weight and is a good choice for most people: small, fast and still close to "
        "the full model.",
        things="(q4_k_m|q4km|q4 k m|q4_k|q4_k_m quantization|a q4_k_m file|Q4_K_M|the q4 format|q4)",
        ask="""
        is (q4_k_m|q4|q4_k|four bit) (good|good enough|any good|ok|fine|useful|recommended)
        how (good|big|small|fast) is (q4_k_m|q4|q4_k)
        """,
    ),
    "q8_0": Topic(
        "Q8_0 stores about eight and a half bits per weight: it is nearly as good as the full model, but about twice "
        "as big and half as fast as Q4_K_M.",
        things="(q8_0|q8|q8 0|q8_0 quantization|a q8_0 file|Q8_0|the q8 format|8 bit quantization)",
        ask="""
        is (q8_0|q8|eight bit) (good|good enough|better|ok|fine|lossless|worth it|recommended)
        how (good|big|large|slow) is (q8_0|q8)
        """,
    ),
    "which_quant": Topic(
        "Q4_K_M is a good choice to start with. Take Q8_0 or Q6_K when you have memory to spare and want the best "
        "quality, and Q3_K_M only when nothing else fits.",
        ask="""
        (what|which) (one|file|version|quant|variant) (of (the|all these) (files|quants|versions)|) (should i|do i|would you|shall i) (take|download|pick|choose|use)
        (how many|which number of) bits (should i|do i|shall i) (use|take|choose|need)
        i (do not|dont) know (which|what) (quant|quantization|type|version) (to take|to choose|i need|i should use|to download)
        (which|what) (quantization|quant|quantisation|type|quantization type|format|bit width|quant type|quantization level) (should|would|do|could|shall|must) (i|you|we|one) (use|take|choose|pick|recommend|download|select|get|start with|go for)
        (which|what) (quantization|quant|type|quantization type|format) is (the|) (best|better|good|right|recommended|most sensible|smallest|fastest)( for me| for my computer|)
        (q4_k_m|q4|q5_k_m|q4_0) (or|vs|versus|against) (q8_0|q8|q6_k|f16|q5_k_m)
        (what is|whats|explain) the difference between (q4_k_m|q4|q4_0|q5_k_m) and (q8_0|q8|q6_k|q5_k_m|f16)
        (should|shall) i (use|take|get|choose|download) (q4_k_m or q8_0|q4 or q8|q8_0 or q4_k_m|q5 or q6|q6_k or q8_0|f16 or q8_0)
        (there are|i see) (so many|many|several|twenty) (quants|quantizations|files|types|variants|versions)(, which one|. which one do i take|, what do i pick|)
        (recommend|suggest) (me|) a (quant|quantization|quantization type)
        (what|which) (quant|quantization) (gives|has) the (best|highest) quality
        """,
        tasks="(choose|pick|decide on|select) (a|the right|the best) (quantization|quant|quantization type|type)",
    ),
    "f16": Topic(
        "F16 and BF16 store 16 bits per weight, and F32 stores 32: that is a model's full precision. They are what you "
        "quantize from; to use a model, Q4_K_M or Q8_0 is faster.",
        things="(f16|fp16|bf16|f32|a f16 file|half precision|full precision|bfloat16|f16 and bf16)",
    ),
    "other_types": Topic(
        "In a name such as Q5_K_M the number is the bits per weight, K marks the k-quants, and S, M and L mean small, "
        "medium and large. Good choices are Q4_K_M, Q5_K_M and Q6_K.",
        things="(q5_k_m|q6_k|q3_k_m|q2_k|q5_0|q4_0|q4_1|q5_1|iq4_xs|iq4_nl|q5_k_s|q3_k_l|k-quants|k quants|q4_k_s)",
        ask="""
        what do the (letters|names|numbers) (in|of) (the|) (quantizations|quants|quant names|types|q4_k_m|file names) (mean|stand for)
        what does the (k|m|s|l|number|q) (in|of) (q4_k_m|q5_k_s|q3_k_l|the name|a quant name) (mean|stand for)
        (what|which) (quantization types|types|quants|formats|quantizations) (are there|exist|are supported|does it support|can quantize make|can i make)
        (list|show) (all|the|) (quantization|quant) types
        """,
    ),
    "memory": Topic(
        FIT,
        ask="""
        (how much|how many gb of) (ram|memory) (will|would|does|do|might) (a|an|the|my) (1b|3b|7b|8b|13b|14b|30b|70b|big|small) {model} (need|take|use|require|want)
        (is|are|would|will) (4|6|8|12|16|24|32|64) (gb|gigs|gigabytes)( of ram| of memory| ram|) (enough|sufficient|be enough|ok|too little)
        (i have|my (computer|laptop|pc|machine) has|there is|ive got) (only |just |)(4|8|16|32|64) (gb|gigs|gigabytes)( of ram| of memory|)(,|.| and) (is that enough|what can i run|which size fits|can it run a 7b model|will it work|how do i know what fits)
        (how|what) (do i|can i|should i) (know|find out|check|see|estimate) (how much|if i have enough|whether i have enough|the) (memory|ram|memory needs)
        (big|large|huge) (model|models|file) (and|with|but) (little|not much|few gb of) (memory|ram)
        {many} {memory} (do i|does it|does a model|does the model|will it|would it|does localllm|does a 7b model|does an 8b model|does my model|do you) (need|take|use|require|consume|want|eat)
        (how much|what) (memory|ram) (is|are) (needed|required|necessary|used|enough)( for a model| for a 7b model| to run it|)
        (is|are|will) (4|8|16|32|64|6|12|eight|sixteen) (gb|gigabytes|gigs|gb of ram|gigs of memory|gb ram) (of ram |of memory |)(enough|sufficient|too little|ok|do)( for a 7b model| for this model| to run a model|)
        (will|does|can|could|would) (a|my|the|this|an) (7b|8b|13b|3b|big|large|70b|) {model} (fit|fit in|fit into|run in|work with|go into) (in memory|into my memory|my ram|8 gb|16 gb of ram|my computer|4 gigabytes)
        i (have|only have|own|got) (4|8|16|32|6) (gb|gigs|gigabytes) of {memory}(,|) (what can i run|is that enough|does it work|can i run a model)
        (memory|ram) (requirements|needs|usage|use|consumption|footprint|needed)
        (how|what) (big|large) (a|of a) {model} (fits|can i fit) (in|into) (8 gb|16 gb|my ram|my memory)
        """,
        tasks="""
        (find out|estimate|compute|calculate|know|see|tell|check|predict) (how much|what) (memory|ram) (a|my|the) (model|file) (needs|takes|uses|will need)
        (know|tell|check|find out|see|say) (if|whether) (a|my|the|some) {model} (fits|will fit|fits in memory|runs on my computer|fits into ram|is too big)
        """,
    ),
    "less_memory": Topic(
        "Use a smaller quantization such as Q4_K_M, a smaller model, or a smaller context with -c. localllm exits with "
        "5 when there is not enough memory.",
        problems="""
        (i|my computer|it|localllm|the program) (ran|runs|run|is running) out of (memory|ram)
        (there is|i have|it says|i get|says) (not enough|too little|insufficient) (memory|ram)
        (out of memory|memory error|not enough memory|oom|memory limit error|killed because of memory)
        my (computer|machine|pc|laptop) (freezes|swaps|hangs|is out of memory|gets stuck) when i load (a|the) (big |) model
        """,
        tasks="""
        (use|need|consume|take|occupy) less (memory|ram)
        (reduce|lower|decrease|cut|save|limit) (the|its|) (memory|ram|memory use|memory usage|memory footprint)
        (run|use|load) a (big|large|huge) model (with|on|in) (little|less|few|not much|a small amount of) (memory|ram|gigabytes)
        """,
        ask="""
        (how|what) (can i do|do i do|to do) (against|about|when there is|with) (too little|not enough|low|insufficient) (memory|ram)
        (it|localllm) (uses|needs|takes|eats|wants) too much (memory|ram)
        """,
    ),
    "kv_cache": Topic(
        "The KV cache holds the keys and values of the tokens seen so far, so that they need not be computed again for "
        "each new token. It grows with the context that you use.",
        things="(the kv cache|kv cache|kv-cache|the kv-cache|a kv cache|key value cache|the key-value cache|kv)",
        ask="""
        (why|what) (does|is) the (kv cache|kv-cache|key value cache) (need|use|take|grow|needed|there for|good for)( so much memory| memory|)
        how (big|large) is the (kv cache|kv-cache)
        """,
    ),
    # --- errors ---------------------------------------------------------------------------------------------------
    "exit_codes": Topic(
        "The exit codes are 0 done, 1 other errors, 2 wrong usage, 3 unreadable or invalid model, 4 prompt does not fit the "
        "context, 5 not enough memory, 6 some records failed, 7 the answer was cut, 130 interrupted.",
        things="(the exit codes|exit codes|return codes|the exit status|exit status|error codes|the return code|the exit code)",
        ask="""
        (what|which) (number|code|codes|status) (does|do|will) (it|localllm|the program|run) (return|exit with|give back|end with)( on errors| when it fails| at the end|)
        (what do|explain) the (numbers|codes) (it|localllm) (returns|exits with)( mean|)
        (which|what) (exit codes|return codes|error codes|exit statuses|return values) (are there|does it have|does it use|does localllm return|exist|can it return)
        (list|show|tell me|name|give me) (the|all|all the|) (exit codes|return codes|error codes)
        how (does|can|do) (a script|my script|i|a program) (know|see|check|tell|notice|detect) (if|whether|that) (it|localllm|run|something) (failed|worked|succeeded|went wrong|was successful)
        (what|which) (is|are) the (meaning|meanings) of the (exit codes|return codes|error codes)
        """,
    ),
    "exit_0": Topic(
        "Exit code 0 means that all went well.",
        ask=_ended("0", "zero"),
        weight=0.55,
    ),
    "exit_2": Topic(
        "Exit code 2 means wrong usage: an unknown command or flag, or a value that is missing or not allowed. Try "
        "--help.",
        ask=_ended("2", "two")
        + """
        (what does it mean|why does it say) (no such option|unknown option|usage error|unknown flag)
        """,
        weight=0.55,
    ),
    "exit_3": Topic(
        "Exit code 3 means that the model file cannot be used: it is unreadable, damaged, incomplete or not supported. "
        "The message names the file and what is wrong.",
        ask=_ended("3", "three")
        + """
        (what|why) (does it mean|is it) (when|if|that) (the|my) (model|file) (is invalid|is refused|cannot be read|will not load)
        (is|maybe) (my|the) (download|file|model) (broken|incomplete|damaged|corrupt)
        """,
        problems="""
        (my|the|this|a) {file} (does not|doesnt|will not|wont|cannot|can not) (load|open|work|start|be loaded|be opened)
        (it|localllm) (says|complains|claims|tells me) (that |)(the|my) (model|file|gguf) is (invalid|broken|damaged|unreadable|not valid|corrupt|not supported|unsupported)
        (invalid|corrupt|broken|damaged|unreadable) (model|gguf|file|model file)
        """,
        weight=0.55,
    ),
    "exit_4": Topic(
        "Exit code 4 means that the prompt does not fit the context: shorten the prompt, or give a larger context with "
        "-c.",
        ask=_ended("4", "four")
        + """
        (it|localllm|the program) (says|complains|tells me) (that |)(the|my) (prompt|text|input) (is too long|does not fit|is larger than the context|doesnt fit)
        """,
        problems="""
        (my|the|this) (prompt|text|file|input|document|question) (is too long|does not fit|doesnt fit|is too big|is longer than the context|exceeds the context|does not fit the context)
        (prompt|text|input) (too long|does not fit|larger than context|does not fit the context)
        """,
        weight=0.55,
    ),
    "exit_5": Topic(
        "Exit code 5 means that there is not enough memory: take a smaller model or quantization, or a smaller context "
        "with -c.",
        ask=_ended("5", "five"),
        weight=0.55,
    ),
    "exit_130": Topic(
        "Exit code 130 means that the command was interrupted, for example with Ctrl-C.",
        ask=_ended("130", "130"),
        weight=0.55,
    ),
    "nonsense": Topic(
        "Strange answers often come from a very small model, a high temperature or a missing chat template. Try a "
        "lower --temp, leave out --raw, or take a bigger model.",
        problems="""
        (the model|it|my model|the ai|the answer) (writes|says|gives|produces|outputs|talks|is|prints) (nonsense|garbage|rubbish|gibberish|complete nonsense|strange things|weird text|wrong answers|stupid things)
        (the|my|its) {answers} (are|look|seem) (wrong|bad|stupid|strange|weird|nonsense|garbage|terrible|poor)
        """,
    ),
    # --- speed, hardware, privacy -----------------------------------------------------------------------------------
    "slow": Topic(
        "Speed is bounded by your memory: each token reads all the weights once. A smaller model or quantization such "
        "as Q4_K_M is faster, and so is closing other programs that are busy.",
        ask="""
        (how can i|how do i|can i|how to) (speed|make) (things|it|everything|the model) (up|faster|quicker)
        (i have to|you have to|one has to) wait (so long|forever|minutes|ages) for (an|every|each|the) (answer|word|reply)
        (any|some) (tips|tricks|advice|ideas) (for|to get|on) (more speed|speed|better performance|faster answers)
        (can|could) (it|localllm|the model|this) (be|go|run) (faster|quicker|any faster)
        why (is|are) (it|localllm|the model|my model|the answer|the answers|this|generation|everything|you) {slow}
        (it|this|localllm|the model|my model|everything|generation|the answer) (is|feels|seems|runs) {slow}
        why does (it|the model|an answer|the answer|localllm|every word) take (so long|forever|ages|so much time)
        (what|how) (can i do|do i do|to do) (to make it faster|to speed it up|for more speed|about the speed|against slow answers)
        (i get|i only get|there are) (only |just |)(a few|two|three|one|5|2) (tokens per second|tokens a second|words per second|words a minute)
        (slow|too slow|speed|performance|slow answers)
        what (limits|bounds|determines) the speed
        """,
        tasks="""
        (make|get) (it|localllm|the model|the answers|my model|this) (faster|quicker|run faster|go faster)
        (speed up|accelerate|improve the speed of|optimize) (it|localllm|the model|generation|the answers|my model)
        (get|have|want) (more tokens per second|more speed|better performance|faster answers|quicker replies)
        """,
    ),
    "gpu": Topic(
        "You need no GPU: localllm runs on the processor (CPU) of an ordinary computer. If there is an NVIDIA card that works, "
        "--device and -ngl say what it computes.",
        ask="""
        (will|would|does|can) (it|this|localllm) (work|run|be ok) (on|with) (a|my|an) (laptop|computer|pc|machine|server) (without|that has no|with no) (gpu|graphics card|nvidia card|dedicated graphics)
        (what|which) (gpu|graphics card|video card) (do i need|is needed|should i buy|is best|does it use|is supported)
        (do i|does it|does localllm|will i|would i|must i) (need|require|have|want|need to have|need to buy) (a|an|some|) (gpu|graphics card|video card|graphics processor|nvidia gpu|amd gpu|gaming card|cuda|graphics chip)
        (does|can|will) (it|localllm|this|the program) (use|run on|support|work with|work without|run without|take advantage of) (a|my|the|an|) (gpu|graphics card|video card|cuda|nvidia gpu|amd gpu|geforce|radeon)
        (is|are) (a|) (gpu|graphics card|cuda|video card) (needed|required|necessary|used|supported|mandatory|a must)
        (gpu|cuda|graphics card|vram|nvidia|gpu support|gpu needed|rocm|metal)
        (can i|does it|will it) (run|work|use it|start) (only |just |)(on|with) (a|the|my|) (cpu|processor|plain cpu|normal computer|ordinary laptop|cpu only)
        i (have no|dont have a|do not have a|do not own a) (gpu|graphics card|nvidia card|gaming pc)
        (cpu only|cpu or gpu|gpu or cpu|without gpu|no gpu)
        """,
    ),
    "hardware": Topic(
        "localllm is fastest on x86-64 processors with AVX2 or newer, and it runs correctly on others as well. It "
        "compiles its kernels for the processor that it finds.",
        ask="""
        (which|what) (processors|cpus|hardware|cpu features|instruction sets) (are supported|does it support|does it need|do i need|can i use|does it run on)
        (is|does it use|does it support) (avx|avx2|avx512|avx-512|vnni|neon|amx)( supported| needed| required| used|)
        (what|which) (cpu|processor|hardware) (do i need|is best|is required|is needed|should i have)
        (hardware requirements|cpu requirements|instruction sets)
        """,
    ),
    "internet": Topic(
        "localllm works without the internet. You need a connection only to install it and to download a model.",
        ask="""
        (what|how) (about|is it with) (offline use|using it offline|no internet|the internet)
        (must|should|do) i (be|stay) (online|connected)( to use it| all the time|)
        (do i|does it|does localllm|will i|does the model|do you) (need|require|use|have|need access to) (an|the|a|) (internet|internet connection|network|online connection|wifi|connection|network connection|internet access)
        (does|can|will|is) (it|localllm|this|the model|the chat) (work|run|be used|function|usable|chat) (offline|without internet|without the internet|without a connection|on a plane|without wifi|without network|with no network|in the woods)
        (is|are) (it|localllm|this|you|the model) (online|offline|connected to the internet|on the internet|in the cloud|a cloud service)
        (offline|offline use|internet|internet needed|works offline|no internet)
        (can|do) (you|the model|it) (search|browse|look up|google|access) (the web|the internet|web pages|something online|websites)
        (what|what happens) if (my|the) (internet|network|wifi) (is down|is off|goes away|fails|is gone)
        """,
    ),
    "privacy": Topic(
        "Your text stays on your computer: localllm runs the model there and sends nothing anywhere.",
        ask="""
        (does|will) (the program|localllm|it|the tool) (phone home|call home|send anything|contact a server|upload something|report anything)
        are (my|our) (chats|texts|questions|prompts|messages|conversations) (private|safe|secret|stored|confidential)
        (are|do) (you|they|the developers|others) (listening|watching|reading along|spying|keeping my data|able to see my chats)
        (can|could) i (use it|work|enter text) (with|for|about) (confidential|secret|private|medical|company) (documents|data|texts|things|matters)
        (what|where) (happens to|goes|do you do with) (my|the) (data|text|questions|input|chats)
        (is|are|will|does) (my|the|our) (data|text|prompts|chat|conversation|chats|messages|input|documents|conversations|words) (private|safe|secure|sent anywhere|sent to a server|stored|uploaded|shared|leave my computer|go to the cloud|stay private|confidential|protected|logged|tracked)
        (do|does|can|will) (you|it|localllm|anybody|anyone|somebody|the developers|a company|openai|google|other people) (collect|send|upload|store|see|read|log|spy on|share|record|transmit|leak|track) (my|any|our|the) (data|texts|prompts|chats|conversations|messages|information|questions|input)
        (what about|how about|tell me about|how is) (privacy|data protection|security|confidentiality|my privacy|telemetry|tracking)
        (privacy|data privacy|telemetry|tracking|data protection)
        (is|does) (there|it have|localllm have) (any |)(telemetry|tracking|analytics|spyware)
        (is it|is this) (safe|ok|secure) (to|for) (enter|type|use|give it|work with|use with) (private|confidential|personal|secret|sensitive|company) (data|documents|texts|things|information|notes)
        (where|to whom) (does|do|is) (my|the) (text|data|prompts|question|message) (go|sent|end up|processed)
        (who|who else) can (see|read) (what i write|my chats|my questions|this conversation)
        """,
    ),
    "license": Topic(
        "Every model has its own license, set by those who made it: look at the page from which you downloaded it.",
        ask="""
        (may|can|am i allowed to) (i |)use (the |these |a |)(models|model) (commercially|at work|in a product|for my company|to earn money)
        (what|which) (is the|) license (do|does|has|of|applies to) (a|the|my|) (model|models)( have|)
        (may|can|am i allowed to) i (use|sell|share|distribute) (a|the|any|these|) (model|models|answers|output) (commercially|at work|in my company|for business|in a product|for money)
        (license|licenses|licence|model license|legal|copyright|terms of use)
        (is|are) (the|a|all|these|) (model|models) (free|open source|free to use|legal|licensed)
        (is it|what about it being) legal to use (a|these|the) (model|models)
        """,
        things="(the license of a model|a model's license)",
    ),
    "cost": Topic(
        "localllm costs nothing to run: there is no account, no key and no fee. Many models can be downloaded for free "
        "as well.",
        ask="""
        (what|how much) (does|do) (it|localllm|this|models|a model|an answer) cost
        (is|are) (it|localllm|this|this tool) (free|free of charge|for free|paid|expensive|open source)
        do i (need|have) (to|an|a) (pay|account|api key|subscription|register|sign up|key|log in|token)( for it|)
        (price|pricing|cost|costs|api key|subscription|account|login|sign up)
        """,
    ),
    "cache_place": Topic(
        "The compiled kernels are kept in localllm's folder in your user cache directory. You may delete it: they are "
        "compiled again when needed.",
        ask="""
        (where|what) (on my disk|in my home directory|on disk) (are|is|goes) the (kernels|compiled kernels|cache|kernel cache)
        (which|what) (files|folders) does (it|localllm) (create|write|leave behind|use)( on my disk| in my home|)
        (where|in which folder|in what directory) (are|does it|does localllm|do you|is) (the|its|store|put|keep|save|cache) (compiled |)(kernels|kernel|cache|cached kernels|cache files|cache folder|compiled code|kernel cache)( stored| cached| kept| saved|)
        (can|may|should) i (delete|remove|clear|clean|empty) the (cache|kernel cache|cached kernels|compiled kernels|cache folder|cache directory)
        (cache folder|cache directory|kernel cache|cached kernels|cache location|where is the cache)
        """,
        things="(the kernel cache|the cache folder|the cache directory)",
        tasks="(delete|clear|remove|clean|empty|find|locate) the (cache folder|kernel cache|compiled kernels|cached kernels|cache directory)",
    ),
    "first_start": Topic(
        "On the first start localllm compiles its kernels for your processor, which takes some seconds; later starts "
        "are quick. localllm warmup does it ahead of time.",
        ask="""
        (the|my) (first|very first) (start|run|launch|answer) (takes|took|was|is|needed) (so long|ages|very long|slow|forever|half a minute|really slow)
        (what|why) (is it doing|does it do|am i waiting|is there a delay|takes it so long) (at|on|before|during) the (first|very first) (start|run|time)
        why (is|was|does|did) (the|my) (first|very first|initial) (start|run|time|use|answer|call|startup|command) (take|so slow|slow|slower|take so long|need so long|slower than the second|take forever|take longer)
        (what|why) (is|does) (it|localllm|the program) (compile|compiling|compile kernels|compiling something|compile something|building)( at the start| at first| the first time|)
        what (are|does) (kernels|compiling kernels|a kernel|the kernels|compiling) (mean|is|)
        (first start|first run|compiling|compiling kernels|kernels|slow start|startup time)
        (it|localllm|the program) (takes|took|needs|needed) (ages|so long|a long time|twenty seconds|half a minute|forever) to start( the first time|)
        (does it|will it|must it) compile (every time|on each start|again and again|the kernels every time)
        """,
    ),
    "python": Topic(
        'From Python: import localllm, open a model with localllm.open("model.gguf"), and loop over '
        'model.generate("prompt") or model.chat(messages), which yield pieces of text.',
        ask="""
        (i am|im) (a python developer|a programmer|writing a python script|writing python code|a developer)(, how do i use localllm|, can i import it|, is there an api|, what do i import)
        (how|what) (do i|does one) (write|code|import) (to use it|in python|to load a model|to generate text)( in python| from python|)
        (is there|do you have|does it have|does localllm have) (a|an|some) (python|programming|) (api|library|interface|bindings|module|package|sdk)
        (can i|how do i|how can i|how to) (import|use|call|embed|integrate) (localllm|it|this|a model|the model) (in|from|within|into) (python|my python code|a python script|a notebook|jupyter|my own program|my code|my application|my app)
        (python|python api|api|python example|library|python usage|python code|jupyter)
        (what|which) (python |)(functions|methods|classes|calls) (are there|does the api have|exist)
        (show|give) me (an example of |)(the|some) (python api|python code for localllm|api)
        (an example|a snippet|sample code|example code) (in|for|with) python
        """,
        tasks="""
        (use|call|load|run|open) (it|localllm|a model|models|this) (from|in|with|out of) python
        (write|make|build) (a|my) (python script|python program|bot|program|app|application) (with|that uses|on top of) (localllm|a local model|it)
        """,
        example='with localllm.open("model.gguf") as model: print("".join(model.generate("Once upon a time", max_tokens=50)))',
    ),
    "stream": Topic(
        "Yes, answers are streamed: each piece of text appears as soon as the model has written it.",
        ask="""
        (do|will) (the |)(words|letters|tokens|sentences|pieces) (show up|appear|come|get printed) (as they are|as theyre|while they are|when they are) (generated|written|made|produced)
        (does|can|will) (it|localllm|run|chat|the chat) (stream|show) (the |)(answers|output|text|tokens|answer)( while it is written| as they come| immediately|)
        (is|are) (the|) {answers} streamed
        (streaming|stream|streamed output|token streaming)
        do i have to wait (for|until) the (whole|complete|full|entire) (answer|reply|text)
        """,
    ),
    "unknown": Topic(
        "I do not know about that; I am too small. localllm --help and the README say what is possible.",
        ask="""
        (can|could) (it|localllm|you|the model) (look at|see|read|understand) (pictures|images|photos|screenshots|videos)
        does (it|localllm) have (a|an|some) (gui|window|app|plugin system|docker image)
        (can|does|could) (it|localllm|the model|you) (look at|recognize|describe|open|play|hear|record|generate) (an image|images|a photo|pictures|sounds|music|videos|my screen|my voice)
        (is|will) there (be |)(a|an|some) (window|mobile app|plugin|extension|vscode extension)
        (can|does|how do|how does|will|could) (it|localllm|i|you|this) (understand|see|read|create|draw|use|process|support|make|show) (images|pictures|photos|video|videos|audio|voice|speech|music|pdfs|screenshots)
        (can|does|how do) (it|localllm|i) (fine-tune|finetune|train|retrain|teach) (a|the|my own|) (model|models|network)
        (does it|can it|how do i|does localllm) (support|use|have|load|offer) (rag|function calling|plugins|agents|vector databases|a gui|docker|themes|multi user mode)
        (is there|do you have) (a|an|any) (gui|app for android|docker image|windows installer|plugin system|forum|discord|mailing list|roadmap)
        (who|which company) (wrote|made|develops|maintains|created|programmed|is behind) (localllm|this tool|this program)
        (when|what year) was localllm (written|released|started|made)
        (where|how) (do|can) i (report|file) (a|) (bug|bugs|issue|issues|a problem)
        """,
    ),
    # --- more of what localllm does; the ways to ask are in guide_wordings.py ---------------------------------------
    "pull_resume": Topic(
        "Give the same command again: localllm pull goes on where an interrupted download stopped, and at the end it checks "
        "the size and the SHA-256 of the file.",
        example="localllm pull qwen3-4b",
    ),
    "exit_1": Topic(
        "Exit code 1 means an error that has no code of its own; the line on stderr says what went wrong.",
        ask=_ended("1", "one"),
        weight=0.55,
    ),
    "exit_6": Topic(
        "Exit code 6 means that map could not answer some records: their lines in the output say why, and the same command "
        "tries them again.",
        ask=_ended("6", "six"),
        weight=0.55,
    ),
    "exit_7": Topic(
        "Exit code 7 means that the answer was cut, by -n or the context, before it was what its JSON schema, grammar or "
        "regular expression promises: give a larger -n.",
        ask=_ended("7", "seven"),
        weight=0.55,
    ),
    "undo": Topic(
        "In a chat, /undo takes back the last question and its answer, and /undo 3 the last three; /edit changes the last "
        "question and asks it instead.",
        things="(/undo|/edit|slash undo|slash edit|the undo command)",
    ),
    "retry": Topic(
        "In a chat, /retry gives another answer to the last question, and /continue goes on with an answer that was cut.",
        things="(/retry|/continue|slash retry|slash continue)",
    ),
    "branch": Topic(
        "In a chat, /branch NAME goes on in a copy of the conversation or goes back to one; without a name it lists the "
        "branches.",
        things="(/branch|slash branch|branches|a branch|branching)",
    ),
    "read_file": Topic(
        "In a chat, /read FILE sends the text of a file with your next question.",
        things="(/read|slash read|/read file)",
        example="/read letter.txt",
    ),
    "slash_set": Topic(
        "In a chat, /set NAME VALUE changes an option, such as /set temperature 0.2, and /show says what holds now.",
        things="(/set|slash set|/show|slash show)",
    ),
    "slash_model": Topic(
        "In a chat, /model PATH goes on with another model, which reads what was said so far.",
        things="(/model|slash model)",
    ),
    "server": Topic(
        "localllm serve MODEL answers other programs on this computer by OpenAI's HTTP interface, at "
        "http://127.0.0.1:11435/v1; a browser finds a page for chatting there.",
        commands="(serve|localllm serve)",
        example="localllm serve model.gguf",
    ),
    "lora": Topic(
        "Adapters such as LoRA are not supported: merge them into the model before, and quantize the merged checkpoint.",
        things="(lora|a lora|lora adapters|adapters|qlora|--lora)",
    ),
    "thinking": Topic(
        "Some models think before they answer: --think on, off, low, medium or high tells them, --think-budget N ends a "
        "thought after N tokens, and --hide-thinking does not show it.",
        flags="(--think|--think-budget|--reasoning|--hide-thinking)",
        things="(thinking|reasoning|a thinking model|reasoning models|the thoughts of a model)",
    ),
    "speculate": Topic(
        "--speculate guesses several tokens at once, where the text repeats itself (ngram) or by a smaller model "
        "(draft:MODEL); the answer is the same, in fewer steps.",
        flags="(--speculate|--speculate draft)",
        things="(speculative decoding|speculation|a draft model|draft models)",
        default="The default is --speculate ngram.",
    ),
    "kv_type": Topic(
        "--kv-type q8_0 stores the KV cache in 8 bits instead of f16 and q4_0 in 4, which takes less memory in long "
        "contexts; -ctk and -ctv set keys and values alone.",
        flags="(--kv-type|-ctk|-ctv|--cache-type-k|--cache-type-v)",
        default="The default is f16.",
    ),
    "kept_prompts": Topic(
        "What was read of long prompts is kept on disk, so that a prompt that begins in the same way is not read again: "
        "localllm cache lists it, localllm cache clear removes it, and --no-cache leaves it out.",
        commands="(cache|localllm cache|cache clear)",
        flags="--no-cache",
        things="(kept prompts|the prompt cache|prompt caching|prefix caching)",
    ),
    "replay": Topic(
        "run --receipt FILE writes what an answer came from, and localllm replay FILE answers again and tells whether the "
        "same text comes out.",
        commands="(replay|localllm replay)",
        flags="--receipt",
        things="(a receipt|receipts)",
    ),
    "several": Topic(
        "--n 3 gives three answers to a prompt, best first, and --beams N looks for the likeliest answers.",
        flags="(--n|--beams)",
        things="(beam search|beams|several answers)",
    ),
    "config": Topic(
        CONFIG,
        commands="(config|localllm config|the config command)",
        things="(config.toml|the config file|the configuration file|the settings file)",
    ),
    "aliases": Topic(
        'An alias is another name for a model: write small = "~/models/small.gguf" under [aliases] in config.toml, and '
        "localllm run small works.",
        things="(an alias|aliases|the aliases table|short names for models)",
    ),
    "overflow": Topic(
        "When the context is full, --on-overflow decides: error stops, drop-turns drops the oldest turns, and shift drops "
        "what is in the middle. chat drops turns, run stops.",
        flags="(--on-overflow|--keep)",
        default="The default is error in run and drop-turns in chat.",
    ),
    "device": Topic(
        "--device says what computes, cpu or cuda, and -ngl how many layers an NVIDIA card takes: a number, all or auto. "
        "By default a card is used if there is one that works.",
        flags="(-ngl|--device|--gpu-layers|-dev|--n-gpu-layers)",
        default="The default is auto.",
    ),
    "completion": Topic(
        "localllm completion SHELL prints a script for bash, zsh or fish, with which Tab completes commands, options and "
        "models.",
        commands="completion",
        things="(tab completion|shell completion|completions)",
        example="localllm completion bash >> ~/.bashrc",
    ),
    "markdown": Topic(
        "localllm chat --markdown renders headings, lists and code in the answers.",
        flags="--markdown",
        things="(markdown rendering|markdown)",
    ),
    "folder": Topic(
        "Pulled models lie in ~/.local/share/localllm/models, or in the folder that LOCALLLM_MODELS names.",
        things="(the models folder|the folder of models|LOCALLLM_MODELS)",
    ),
    # --- small talk -------------------------------------------------------------------------------------------------
    "hello": Topic(
        "Hello! I am the guide, a tiny model that is built into localllm. Ask me how to use it.",
        ask="""
        (hello|hi|hey|hallo|hi there|hello there|hey there|good morning|good evening|good afternoon|good day|greetings|howdy|yo|hiya|moin|hola|morning|evening)( guide| localllm| friend| bot| you| everybody| everyone| computer| little model| again|)
        (hello|hi|hey) (is|are) (anybody|you|anyone|somebody) (there|here|home|listening)
        (is anybody|are you|anyone) (there|here|home|awake|alive)
        (nice|good|pleased|happy) to (meet|see) you
        (test|testing|test test|hello world|ping|this is a test|can you hear me|can you read this|does this work)
        """,
        chatter=True,
        weight=1.3,
    ),
    "who": Topic(
        "I am the guide, a tiny language model that is built into localllm. I know localllm and a little small talk, and "
        "not much else.",
        ask="""
        (who|what) are you( exactly| really| actually| then| anyway| again)
        are you (chatgpt|gpt|claude|gemini|a human|a bot|an ai|real|a robot)
        (am i|are we) (talking|speaking|chatting) (to|with) (a human|a person|a machine|a robot|an ai|chatgpt|a bot)
        (who|what) are you
        (who|what) (exactly |)(are|is|r) (you|u|this|there|that)( exactly| really| anyway| actually|)
        (what is|whats|tell me) your name
        (do you|does it) have a name
        (tell me|say|talk) (something |a bit |more |)about (yourself|you)
        (introduce|describe|present|explain) yourself
        (are you|is this) (chatgpt|gpt|claude|gemini|llama|siri|alexa|openai|a human|a person|human|a robot|a bot|an ai|real|a real person|a machine|a computer|a program|deepseek|alive|conscious|somebody|a language model)
        (with|to) (whom|who|what) am i (talking|speaking|chatting|writing)( to| with| here| right now|)
        (who|what) (am i|are we) (talking|speaking|chatting|writing) (to|with)( here| right now| now| at the moment|)
        who is (this|there|answering|writing|on the other side|on the line|at the other end)
        (which|what|what kind of|what sort of) (model|ai|llm|bot|language model|machine|program) (are you|is this|am i talking to|is answering|do i talk to|is speaking)
        (what|which) (model|one) (is|are) (built in|the built-in one|the guide|the default model)
        how (should|may|can|do) i (call|name|address) you
        """,
        things="(the guide|the built-in model|the built in model|the built-in guide|guide.gguf)",
        chatter=True,
        weight=1.3,
    ),
    "size": Topic(
        "I am tiny: about four million parameters in a file of about 4 MB. For real work load a bigger model with "
        "localllm chat model.gguf.",
        ask="""
        (what|which) (size|number of parameters) (do you have|has the built-in model|are you)
        how (big|large|small|tiny|heavy|many megabytes) are you
        how many (parameters|weights|layers|billion parameters|neurons|bytes) (do you have|have you|are you|does the built-in model have|does the guide have)
        (what is|whats) your (size|parameter count|file size|number of parameters)
        (are you|you are|youre) (small|tiny|big|a small model|a tiny model|a big model|so small|really tiny|really that small|a large language model)
        how (big|large|small) is the (built-in|built in|default|included|bundled|tiny) model
        """,
        chatter=True,
    ),
    "smart": Topic(
        "I am not smart: I am a tiny model that knows localllm and little else. For clever answers load a bigger model "
        "with localllm chat model.gguf.",
        ask="""
        (are you|how) (smart|clever|intelligent|stupid|dumb|good|wise|useful|reliable)( are you| at all| really|)
        (you are|youre|you seem|you sound) (stupid|dumb|not very smart|useless|an idiot|not smart|bad|terrible|wrong|boring|annoying|not helpful|not very clever|not very bright|silly|the worst)
        (that|this|your answer) (is|was|makes) (wrong|nonsense|not right|no sense|not what i asked|not helpful|useless|stupid|incorrect|false|bad|not true|a bad answer)
        why (are you|do you sound|are your answers) (so |)(stupid|dumb|limited|bad|short|useless|silly)
        (why cant you|why can you not|why dont you) (answer|know|do|understand) (that|this|anything|my question|more|it)
        can i (trust|believe|rely on) (you|your answers|what you say)
        (are you|can you be) (sure|wrong|certain|right|mistaken)( about that|)
        (do|can) you (make|make any|ever make) mistakes
        (i do not|i dont) (believe|trust) you
        """,
        chatter=True,
    ),
    "made": Topic(
        "I was trained from scratch by scripts/train/train_guide.py in localllm's repository, on text that this script "
        "composes itself.",
        ask="""
        who (built|made|trained|created|programmed|wrote) you
        (who|what) (made|built|trained|created|programmed|wrote|invented|designed) you
        (how|where|when|on what|by whom) were you (made|trained|built|created|born|programmed)
        (what|which) (data|text|training data|books|texts) (were|are|have) you (trained on|made from|learned from|seen|trained with)
        (where|how) (did you|do you) (learn|come from|know that from|learn that|get your knowledge)
        (who is|whos|who are) your (maker|creator|developer|father|mother|parents|boss|owner|author|programmer)
        (how was|who trained|how did they train) the (built-in model|guide|tiny model)
        how old are you
        (can i|how do i) train (you|the guide|the built-in model)( myself| again|)
        """,
        chatter=True,
    ),
    "can_do": Topic(
        "I can tell you about localllm: its commands and flags, where to get a model, how to quantize one, and what to "
        "do when something goes wrong.",
        ask="""
        what (can|could|do) you (do|do for me|answer|know|help me with|help with|tell me|explain|offer|talk about)
        (what|which) (questions|topics|things|subjects) (can|may|should|could) i ask( you|)
        what (are you good at|are you able to do|are your abilities|are you made for|is your job|is your purpose|are your skills|is your task|are you for)
        (what|what else) (should|can|could|may) i ask( you|)
        (how|with what) can you help( me|)
        (do you|what do you) know (anything|something|much|about|a lot|everything)( about localllm|)
        (can|may|could) i ask you (something|a question|anything|some questions)
        (i have|ive got) (a|some) (question|questions|problem|small question)
        what do you know
        """,
        chatter=True,
    ),
    "how_are_you": Topic(
        "I am fine, thank you! What would you like to know about localllm?",
        ask="""
        (hey|hi|hello|ok|so)(,|) (how is it going|how's it going|hows it going|how are you|how do you do|how are things)( today|)
        (how|how r|how're) (are|is|) (you|u|ya|it going|things|life|everything|your day)( doing| today| going| feeling| right now|)
        (how do you|how are you|do you) (do|feel|feeling)( today|)
        (are you|you) (ok|okay|fine|well|alright|good|happy|sad|tired|bored|hungry|lonely|busy)( today|)
        (whats|what is|wassup|what) (up|new|going on|happening)
        (how has|how was) your (day|night|week|morning)( been|)
        (did you|have you) (sleep|slept) well
        i (am|m) (fine|good|well|ok|happy)(,| ) (and you|and how are you|how about you|you)
        """,
        chatter=True,
    ),
    "thanks": Topic(
        "You are welcome! Ask me again whenever you like.",
        ask="""
        (thanks|thank you|thx|ty|cheers|thanks a lot|thank you very much|many thanks|thank you so much|thanks so much|much appreciated|thanks for your help|danke|merci|tysm)( for your help| for that| for the answer| guide| my friend| little one| for helping| for explaining|)
        (that|this|it|you) (was|were|is|has been|have been) (very |really |so |quite |)(helpful|useful|great|kind|good|perfect|nice|excellent|just what i needed|a good answer|of great help)
        (you helped|you have helped|youve helped) (me|) (a lot|me a lot|very much|)
        (great|perfect|excellent|awesome|wonderful|cool|nice|super|good job|well done|brilliant|good bot|good answer)(,| |)(thanks|thank you|that helps|that helped|that works|it works now|it worked|)
        (i appreciate|i am grateful for|i value) (it|your help|that|this)
        (now i understand|i understand now|that helped me|problem solved|solved|it works|it works now|works like a charm)(, thanks|, thank you|)
        """,
        chatter=True,
    ),
    "bye": Topic(
        "Goodbye! To leave the chat, type /exit or press Ctrl-D.",
        ask="""
        (ok|okay|alright|well|fine)(,|) (bye|goodbye|bye bye|see you|good night|see you later|see you tomorrow|cya)( then| now|)
        (bye|goodbye|good bye|bye bye|see you|see you later|see ya|farewell|ciao|tschuess|cya|take care|good night|until next time|so long|later|see you soon|see you tomorrow|adios)( guide| friend| then| for now| my friend| little model|)
        (i|i have to|i must|i need to|i should|i will|ill|time to) (leave now|go now|go|be off|leave|be going|go to bed|am leaving|get going|go home)( now|)(, bye| goodbye| see you|)
        (that is|thats|that will be) all( for today| for now| thanks| i wanted to know|)
        have a (nice|good|great|lovely) (day|evening|night|weekend|one|time)
        """,
        chatter=True,
    ),
    "joke": Topic(
        (
            "Why did the tiny model cross the context? To get to the other token.",
            "A model walks into a bar. The bartender asks what it will have, and it says: the most likely drink.",
            "I would tell you a long joke, but it does not fit my context.",
        ),
        ask="""
        (tell|give|say|do you know|know|make|write|have you got|do you have|got|let me hear|i want to hear|i need|i would like to hear)( me| us|) (a|another|some|any|one more|a good|a funny|the best|your best) (joke|jokes|joke please|something funny)
        (can|could|will|would) you (tell|make|say|give|do)( me| us|) (a|another|some|one) (joke|jokes|funny joke|good joke)
        (make me|try to make me|can you make me) (laugh|smile|giggle)
        (say|tell me) something (funny|amusing|hilarious|silly)
        (joke|jokes|joke please|another joke|one more joke|a joke)
        (are you|can you be|do you have) (funny|humorous|a sense of humor|any humor)
        (cheer me up|entertain me|i am sad|i am bored|im bored|i feel sad|i had a bad day)
        """,
        chatter=True,
        weight=1.1,
    ),
    "weather": Topic(
        "I cannot know the weather: I have no window and no internet, only a little knowledge of localllm.",
        ask="""
        (what|how|whats|hows) (is|will|was|) (the|) weather( like| be| be like|)( today| tomorrow| outside| in london| in berlin| in paris| now| this weekend| right now| there|)
        (is it|will it|does it|was it|is it going to|will there be) (rain|raining|snow|snowing|sunny|cold|warm|hot|be sunny|be cold|be warm|cloudy|windy|be windy|a storm|snow|freeze|rain)( today| tomorrow| outside| tonight| this weekend| in london| next week| later| on monday|)
        (do i need|should i take|should i bring|shall i take) (an umbrella|a coat|my umbrella|a jacket|sunglasses)( today| tomorrow|)
        (weather|weather forecast|forecast|weather today|weather tomorrow|weather report|the weather)
        (what is|whats) the (temperature outside|temperature in berlin|forecast|forecast for tomorrow|weather forecast|temperature in rome)
        (how|is it) (cold|warm|hot) (is it|)(outside|today|in spain|right now| outside)
        (when|how long) will (the rain|the snow|the storm|the heat) (stop|end|last|come|begin)
        """,
        chatter=True,
        weight=1.1,
    ),
    "time": Topic(
        "I cannot know the time or the date: I have no clock, only a little knowledge of localllm.",
        ask="""
        (what|whats|tell me|do you know) (time|the time|is the time|time is it|the current time|what time it is)( now| right now| in new york| in tokyo| please|)
        (what|which|whats) (day|date|year|month|weekday) (is it|is today|do we have|is this|is it today)( today| now|)
        (what is|whats) (the date|todays date|the day|the current date|the year)( today|)
        (is it|is today) (monday|sunday|friday|christmas|late|morning|night|weekend|summer|a holiday)( already| yet| today|)
        (what is|whats|any) (new|the news|in the news)( in the world| today|)
        (how late is it|time|date|todays date|clock)
        """,
        chatter=True,
    ),
    "languages": Topic(
        "I only know English. For other languages load a bigger model with localllm chat model.gguf.",
        ask="""
        (do|can|could) you (speak|understand|write|talk|answer in|talk in|reply in|know) (german|french|spanish|english|chinese|italian|other languages|my language|russian|japanese|any other language|dutch|polish|arabic|hindi|turkish)
        (which|what|how many) (languages|language) (do you|can you|does the guide) (speak|understand|know|write)
        (sprichst du deutsch|kannst du deutsch|parlez vous francais|tu parles francais|hablas espanol|habla usted espanol|parli italiano|was ist das|wie geht es dir|wer bist du|que es esto|bonjour|guten tag|buenos dias|comment ca va|como estas|wo bin ich|ich habe eine frage|je ne comprends pas|no entiendo)
        (answer|reply|speak|talk|write)( to me|) (in|) (german|french|spanish|chinese|italian|japanese|dutch|russian)( please|)
        """,
        chatter=True,
    ),
    "feelings": Topic(
        "That is kind, but I am only a tiny program without feelings. I am glad to help you with localllm, though.",
        ask="""
        (i love|i like|i hate|i adore|i miss) you( so much| very much| a lot|)
        (do|can) you (love|like|hate|miss|feel|dream|think|sleep|eat|laugh|cry|have feelings|have emotions|have dreams|feel pain|have friends|get tired|drink coffee)( me| anything| something|)
        (you are|youre) (cute|nice|sweet|funny|my friend|the best|lovely|amazing|adorable|cool|great|awesome|pretty|clever|so smart|smart|wonderful|beautiful)
        (will|would) you (marry me|be my friend|go out with me|miss me|have dinner with me)
        (are we|can we be) friends
        what (is|are) your (favorite|favourite) (color|colour|food|movie|book|animal|song|number|film|music)
        """,
        chatter=True,
    ),
    "ok": Topic(
        "Good. What else would you like to know about localllm?",
        ask="""
        (ok|okay|alright|i see|got it|understood|fine|sure|yes|yep|yeah|no|nope|right|good|hm|hmm|aha|ah|oh|well|all right|makes sense|interesting|really|wow|k|cool|i understand|maybe|of course|go on|continue|never mind|nevermind|sorry|my mistake|oops|lol|haha)( then| good| i see| now|)
        """,
        chatter=True,
    ),
    "gibberish": Topic(
        "I did not understand that. Ask me about localllm, for example: how do I get a model?",
        ask="""
        {gibberish}
        {gibberish} {gibberish}
        {gibberish} {gibberish} {gibberish}
        (?|??|...|!|.|-|--|*|what|huh|eh|a|x|1|123|42|0|asdf|qwerty|foo|bar|foo bar|lorem ipsum|blah|bla bla|xyz|test123|aaa|jkl)
        """,
        chatter=True,
        weight=0.6,
    ),
}

FOREIGN = {
    "country": "(france|germany|italy|spain|japan|china|india|brazil|canada|mexico|egypt|kenya|norway|sweden|poland|greece|turkey|peru|chile|cuba|iran|iraq|australia|austria|belgium|denmark|finland|hungary|iceland|ireland|nigeria|russia|thailand|ukraine|vietnam|argentina|the netherlands|england|scotland|switzerland|south africa|new zealand|the usa|{word})",
    "city": "(paris|london|berlin|rome|madrid|tokyo|new york|moscow|cairo|sydney|vienna|boston|chicago|munich|oslo|dublin|prague|istanbul|delhi|{word})",
    "person": "(albert einstein|isaac newton|napoleon|shakespeare|mozart|beethoven|cleopatra|julius caesar|marie curie|gandhi|lincoln|the president|the pope|the queen|darwin|picasso|leonardo da vinci|elvis|madonna|bill gates|the king of england|goethe|plato|{word} {word}|{word})",
    "thing": "(love|gravity|democracy|photosynthesis|a black hole|the moon|an atom|dna|inflation|a volcano|philosophy|the meaning of life|quantum physics|evolution|capitalism|the big bang|electricity|a virus|climate change|a rainbow|jazz|chess|a prime number|the pythagorean theorem|blockchain|bitcoin|a neutron star|a mortgage|tax|the stock market|a haiku|a verb|relativity|{word}|a {word}|the {word})",
    "food": "(pizza|bread|pancakes|soup|a cake|pasta|rice|eggs|a steak|coffee|tea|lasagna|curry|sushi|cookies|potatoes|an omelette|a salad|pudding|{word})",
    "animal": "(cat|dog|horse|elephant|whale|tiger|bird|fish|spider|bee|lion|penguin|cow|mouse|snake|shark|wolf|bear|{word})",
    "language": "(python|java|javascript|c|c++|rust|go|sql|html|bash|haskell|perl|typescript|ruby|php|assembler|css)",
    "program": "(sorts a list of numbers|adds two numbers|reverses a string|reads a csv file|prints the first primes|computes fibonacci numbers|downloads a web page|finds duplicates|plays tic tac toe|parses a date|counts words|computes a factorial|checks for palindromes|scrapes a website|sends an email|draws a circle|merges two arrays|searches a tree)",
    "poem": "(poem|story|song|letter|essay|speech|haiku|limerick|novel|email|cover letter|fairy tale|blog post|sonnet|screenplay|birthday card|tweet|slogan|rap|report)",
    "number": "(1|2|3|5|7|8|9|12|17|25|37|48|64|99|100|123|144|256|365|1000|2024|nine|seven|twelve|three|fifty|twenty)",
    "body": "(head|back|stomach|knee|tooth|foot|arm|throat|eye)",
}

FOREIGN_ANSWER = (
    "I am only a tiny model that knows localllm. For that question, load a bigger model with localllm chat model.gguf."
)
FOREIGN_QUESTIONS = """
(what|whats|what is|tell me|name|do you know) the (capital|capital city|largest city|population|flag|currency|president|king|official language|highest mountain|longest river|area) of {country}
(what|which) (city|town) is the capital of {country}
(capital|population|president|currency|history) (of|) {country}
(where|in which country|on which continent) is {city}( located| exactly|)
how (big|old|far|large|rich|populated|far away|expensive|safe|hot) is {city}
(what|whats|what is) {number} (plus|minus|times|divided by|+|-|*|/|x|to the power of) {number}
(how much|what) is {number} (plus|minus|times|divided by|+|-|*|/|x|percent of) {number}
{number} (+|-|*|/|x|plus|times|minus) {number}
(solve|compute|calculate|work out|integrate|differentiate) (x + 3 = 7|2x = 10|the square root of {number}|{number} factorial|x squared|{number} times {number}|the sum of {number} and {number}|an equation|this equation for x)
(what|whats|what is) the (square root|cube|half|double|logarithm|factorial) of {number}
(who|who exactly) (is|was|were) {person}
(who|which person) (invented|discovered|wrote|painted|founded|composed|built|directed) (the telephone|america|hamlet|the mona lisa|the light bulb|the wheel|penicillin|the bible|faust|the radio|star wars|the fifth symphony|{word}|the {word})
(when|where|how|why) (was|did|is|were) {person} (born|die|live|famous|become famous|killed|married)
(when|why|how) did (world war two|the french revolution|the cold war|the roman empire|the titanic|the war|the middle ages|the {word}|the dinosaurs) (end|start|begin|happen|fall|sink|die out)
(who|which team) (won|wins|will win|lost) (the world cup|the election|the super bowl|the olympics|the match|the war|the race|the oscar|the {word} cup)( in {number}| last year| yesterday|)
(what is|whats|explain|define|what does it mean|tell me about|describe|what are) {thing}( to me| in simple words| please| for kids|)
(how|why) (does|do|did) ({thing}|a {animal}|an engine|the heart|the brain|a plane|birds|cats|magnets|vaccines|a fridge|the sun|stars|trees|people) (work|fly|sleep|shine|move|exist|grow|dream|purr|burn)
(why|how) is (the sky|grass|blood|the sea|snow|the sun|ice|sugar|{word}) (blue|green|red|salty|white|hot|slippery|sweet|made|so {word})
how (many|much) (legs|people|planets|days|bones|hours|stars|moons|countries|calories|{word}s) (does a {animal} have|are there|are in a year|live on earth|are in the human body|are in a {word}|does {country} have)
how (do|can|should) i (cook|bake|make|prepare|boil|fry) {food}( at home| quickly|)
(give|tell|write|show|find)( me|) (a|the|your best|some) (recipe|recipes) (for|with|of) {food}
(what|which) (should|could|can) i (eat|cook|wear|buy|watch|read|give my mother|play|study|do) (today|tonight|for dinner|for her birthday|this weekend|next|for christmas|in {city})
(write|compose|create|make|draft|give)( me|) (a|an|a short|a funny|a long|a nice) {poem}( about {thing}| about a {animal}| about {word}| for my boss| for my mother| about love| about {city}|)
(tell|read)( me|) (a|an|some|a short) (story|tale|bedtime story|poem|riddle|fun fact|ghost story|secret|fact)( about {thing}| about a {animal}| about {city}|)
(write|code|program|implement|show|give|generate|create)( me|) (a|an|some|the|) ({language}|{language}|) (program|function|code|class|script|snippet|method|algorithm) (that|which|to|for something that) ({program}|{program}|{word}s {word}s)
(how|can you show me how) (do|to|can|would) (i|you|one|) (sort a list|open a file|write a loop|parse json|define a class|reverse a string|make a web page|declare a variable|read a csv|connect to a database|use recursion) in {language}
(fix|debug|review|refactor|explain|optimize) (my|this|the following) ({language} |)(code|program|bug|function|script|query)
(translate|say|write|how do you say|how do i say) (hello|good morning|i love you|thank you|this sentence|house|water|the {animal}|where is the station|{word}|cheese) (in|into|to) (german|french|spanish|italian|latin|japanese|russian|greek|dutch|korean|english)
(what|how) (is|do i do against|can i do against|do i do when i have) (a |)(headache|fever|cold|flu|broken leg|cough|sunburn|toothache|back pain|{body} pain|allergy)
my {body} (hurts|aches|is swollen|itches)( what can i do| what should i do| help|)
(should i|is it good to|can i) (buy|sell|invest in|marry|move to|quit|study|adopt) (stocks|a house|bitcoin|my boyfriend|{city}|my job|gold|a {animal}|medicine|law|shares|a car|smoking)
(what|which) (movie|film|book|song|phone|car|game|band|restaurant|hotel|laptop|series|{word}) (is|was) (the best|good|the most popular|the longest|the cheapest|number one|playing tonight)( in {city}| of all time| right now|)
(recommend|suggest|name|list|give me)( me|) (a|some|three|five|ten|good) (movies|books|songs|names for a {animal}|baby names|films|restaurants in {city}|places in {country}|games|wines|holiday destinations|gifts|synonyms for {word}|animals|countries|{word}s)
(what|which) (is|are) the (tallest|fastest|biggest|smallest|oldest|richest|deadliest|heaviest|longest) (building|{animal}|animal|country|river|mountain|person|tree|planet|ocean|car|word|{word})( in the world| on earth| in {country}|)
(what|whats|what is) the (meaning|origin|opposite|plural|synonym|definition|pronunciation|spelling) of ({word}|life|happy|big|this word|mouse|love|the word {word})
(do|can) (you) (play|sing|draw|drive|dance|paint|cook|count to {number}|do math|do my homework|write code|program|order {food}|book a flight|call my mother|set an alarm|send an email|tell fortunes|play chess|solve equations|calculate|rhyme|write poems)
(help me with|do|solve|check|correct) my (homework|math homework|taxes|thesis|grammar|english|essay|spelling|exam|physics exercise|resume|application)
(what do you think|what is your opinion|how do you feel) about (politics|the government|{person}|{thing}|football|religion|war|{country}|cats|money|god|{city})
(how|where) (do|can) i (fix|repair|clean|buy|find|plant|learn|tie|change|sell|wash|paint|lose|get) (my car|a bicycle|a tie|weight|tomatoes|the guitar|a tire|my shoes|a job|a girlfriend|windows|a {animal}|my phone|a cheap flight|spanish|the piano|a {word}|my {word})
(when|what time) does (the train|the bus|the shop|the next flight|the museum|the movie|the sun|the bank|school|the {word}) (leave|open|close|start|rise|set|arrive|begin|end)( in {city}| today| to {city}|)
(how far|how long|how many kilometers|how many miles) is it (from {city} to {city}|to the moon|to {city}|to the sun)
(what|which) (planet|element|animal|gas|metal|color|organ|bird|{word}) (is|has|can|makes) (the biggest|the closest to the sun|rings|fly|the lightest|the fastest|red|in the air|symbol {word}|honey)
(summarize|explain|analyze|review) (the plot of {word}|hamlet|the bible|the news|the french revolution|this article|romeo and juliet|the theory of relativity|war and peace)
(is|are|was) (god|santa|{person}|the earth|aliens|unicorns|ghosts|{word}s|time travel) (real|alive|flat|possible|dangerous|good|still alive|round)
(what|how) (is|are|about) (the stock price|the price of gold|the exchange rate|bitcoin|the score|football results|the lottery numbers|the traffic|gas prices)( today| now| in {city}| of {word}|)
(play|sing|draw|book|order|call|turn on|turn off|buy|open) (some music|a song|a picture of a {animal}|a table|{food}|my mother|the light|the heating|a game|a flight to {city}|the door|a {word})
(i|my friend|my boss|my wife|my {animal}|my son) (am|is|feels|looks|was) (in love|sick|angry|depressed|pregnant|lost|getting married|moving to {city}|afraid of {animal}s|looking for a job)( what should i do| help| any advice|)
(what|tell me what) happened (in {number}|yesterday|in {country}|on september 11|in the news|to {person}|in {city} in {number})
(count|spell|list|say|repeat) (to ten|the word {word}|the alphabet|backwards|all planets|the months|the vowels|up to {number}|{word} {number} times)
(convert|how much is|how many) ({number} (miles|pounds|dollars|celsius|inches|feet|ounces|cups|euros)) (to|in|into|are) (kilometers|kilos|euros|fahrenheit|centimeters|grams|yen|liters)
(roleplay|pretend|act|imagine|play)( that|) (you are|as|like|to be) (a pirate|{person}|a {animal}|my girlfriend|a doctor|a teacher|the king|an evil ai|santa|a {word})
(who|what) (is|are) (your president|the prime minister|the chancellor|the richest person|the best player|the beatles|the romans|the {word}s)( of {country}| in the world|)
(what is|whats|who is|where is|how is|define|explain|who was|tell me about) {word}( {word}|)
(can you|could you|please|would you) (explain|tell me about|describe|talk about|write about|help me with) ({thing}|{person}|{country}|{word}|the history of {country}|math|physics|biology|chemistry|geography)
"""

# What stands around a pattern, by its kind.
FRAMES = {
    "ask": "{}",
    "tasks": """
        (how do i|how to|how can i|how do you|how would i|how does one|how could i|how should i|how do we|how do people) {}
        (how do i|how to|how can i|how would you|how might i|how am i supposed to|how does somebody) {}
        (can i|could i|may i|is it possible to|is there a way to|is there any way to|is there an easy way to|am i able to) {}
        (can localllm|can it|can you|could it|does it let me|does localllm let me|will it let me|can this tool) {}
        (i want to|i would like to|id like to|i need to|i have to|i wish to|i am trying to|i try to|i plan to|i wanna|i was hoping to) {}
        (i want to|i would like to|id like to|i need to|i am trying to) {}(, how|, what do i do|. how|, how do i do that|, any hint|, which option)
        (what do i do to|what should i do to|what must i do to|what do i need to|what can i do to|what is the way to|what is the best way to) {}
        (which flag do i use to|which option do i need to|which command do i use to|what flag lets me|what do i type to|what do i enter to|what is the command to|what is the option to|is there a flag to|is there an option to|is there a command to) {}
        (show me how to|tell me how to|explain how to|teach me how to|help me to|help me|can you show me how to|can you tell me how to|do you know how to|i do not know how to|i dont know how to|i cant figure out how to|i have no idea how to|let me|please explain how i) {}
        (can you explain how i can|explain how i|tell me how i can|what if i want to|what about when i want to|i cannot find out how to|where do i) {}
        {}
        """,
    "things": """
        (what is|whats|what's|what are|what exactly is|what on earth is|wat is|so what is|and what is|what do you call) {}
        (what does|what do people mean by|what is meant by|what do you mean by|what does the word) {}( mean|)
        (explain|describe|define|tell me about|tell me something about|say something about|talk about|what about|info on|information about) {}( to me| briefly| in simple words|)
        (can you explain|could you explain|please explain|can you tell me about|could you describe|help me understand|i do not understand|i dont understand|i dont get|i have never heard of|never heard of|i keep reading about|what should i know about|what do i need to know about|i would like to understand|i want to know about|do you know) {}
        (what is|whats|what's) {} (for|good for|about|used for|there for)
        (why|what) (do i need|would i want|is the point of|is the purpose of|is the idea of|is the idea behind|should i care about) {}
        (how does|how do|how would you explain|how does one explain) {}( work|)
        {}( meaning| definition| explained| explanation| in short|)
        """,
    "flags": """
        (what does|what does the|what's the effect of|what is the effect of|what will) {}( flag| option| parameter| switch| setting| argument|)( do| mean| change| stand for| control|)
        (what is|whats|what's|what are) (the |){}( flag| option| parameter| switch| setting| argument|)( for| good for| used for| about|)
        (explain|describe|tell me about|what about|info on|help with|can you explain|please explain|i do not understand|i dont get) (the |){}( flag| option| parameter| switch| setting|)
        (how do i use|how to use|how does|when do i use|when should i use|why would i use|when would i need|why do i need|should i use|may i use) (the |){}( flag| option| parameter| switch| setting|)( work|)
        (what happens|what changes|what do i get) (if i use|when i use|if i pass|when i pass|when i set|if i set|with|if i raise|if i lower|if i add) (the |){}( flag| option|)
        (meaning of|purpose of|use of|usage of|syntax of|value of|the meaning of) (the |){}( flag| option|)
        (what value|which value|what number|which values|what) (should i|do i|can i) (use|give|pass|take|set) (for|with|to) {}
        {}( flag| option| parameter| meaning| usage| setting|)
        """,
    "commands": """
        (what does|what will|what can) (the |localllm |the command |the localllm |){}( command| subcommand|)( do| mean| do for me| give me| print|)
        (what is|whats|what's) (the |localllm |the command |){}( command| subcommand|)( for| good for| used for| about|)
        (explain|describe|tell me about|what about|info on|help with|can you explain|please explain) (the |localllm |){}( command| subcommand|)
        (how do i use|how to use|how does|when do i use|when should i use|why would i use|when would i need) (the |localllm |){}( command| subcommand|)( work|)
        (what happens|what do i get|what do i see) (if i|when i) (run|call|type|use|enter|start|execute) localllm {}
        (usage of|purpose of|meaning of|use of) (the |localllm |){}( command|)
        (localllm |){}( command| usage|)
        """,
    "problems": """
        {}
        {}
        (why is it that|why|it happens that|i have a problem, |help, |my problem is that|the problem: |what if|what do i do if|what do i do when|what can i do when|what does it mean if|oh no, ) {}
        {}(, why|, what can i do|, how do i fix that|, what is wrong|, what now|, what should i do|, can you help|, what does that mean|, why is that|, is that normal|. why|. how do i change that)
        """,
}

# What people write before and after a question.
BEFORE = (
    "(hi, |hey, |hello, |hi |hey |ok, |ok |so |so, |um, |well, |excuse me, |sorry, |sorry but |quick question: |a question: |"
    "question: |can you tell me |could you tell me |please tell me |tell me |tell me, |please |i wonder |i was wondering |"
    "i would like to know |i want to know |do you know |do you know, |dumb question, |and |but |just curious, |hm, |"
    "just asking: |as a beginner, |say, |listen, |guide, |one more thing: |next question: |also, |now |then |actually, |"
    "dear guide, |good, |great, |alright, |maybe you know |i forgot, |remind me, |i am not sure, |can someone tell me |"
    "any idea |hey guide, |oh, |wait, |right, |once again, |first, |by the way, |i am confused, |basically |simply put, |"
    "let me ask: |another question: |hi there, |hi guide, |good day, |thanks. |thank you. |i see. |nice. |"
    "i am working on a {word} project. |i have a {word} computer. |my {word} asked me: |i am writing a {word}. |"
    "i have a new laptop. |i downloaded a model yesterday. |i am using linux. |i am not a programmer. |i read the readme. |"
    "i am in a chat. |i just started. |i installed localllm today. |i am a bit lost. |my model is llama. |i tried everything. |"
    "i read about {word}. |i am a {word}. |for my {word}, |yesterday i tried {word}. |)"
)
AFTER = (
    "( please| thanks|, please| exactly| again| then| for me|, i am a beginner|, i forgot|, i am confused|, can you help|"
    ", any idea| actually|, just curious| in simple words| by the way|, do you know|, i could not find it| right now|"
    " usually| really| at all| if i may ask| anyway| now| today| my friend|, thank you| pls| somehow| for my {word}|"
    " with {word}| like {word}| in {word}| or {word}| about {word}|, because my {word} is {word}| instead of {word}| when i {word}| while i {word}|, so that i can {word}| and {word}|, i want {word}| ok| these days|)"
)
AFTER_LOCALLLM = (
    "( in localllm| with localllm| with this tool| here| on my computer| in the terminal| for localllm| using localllm|"
    " in this program| on the command line| for my model| on my laptop| with a model| with my model|)"
)

# Follow-up questions.
EXAMPLE = (
    "(for example|example|an example please|can you give (me |)an example|(show|give) me an example|how does that look|"
    "what does that look like|for instance|can you show me|show me|how exactly|how would i type that|give an example|"
    "do you have an example|could you show me how|what do i type exactly|and how do i write that|an example would help)"
)
DEFAULT = (
    "(what is the default|whats the default|and the default|what is its default value|default|the default value|"
    "what is the standard value|and if i leave it out|and without it|what if i do not set it|what does it default to|"
    "which value is used if i do not set it|and by default|what is it by default)"
)
MORE = (
    "(tell me more|more|can you explain (more|that|it better)|more details( please|)|anything else|is that all|"
    "i want to know more|can you elaborate|more information|explain that( in more detail|)|say more|and further|"
    "could you go deeper|that is too short)"
)
AGAIN = (
    "(again|say that again|repeat|repeat that|can you repeat that|once more|what did you say|pardon|come again|"
    "sorry, what|please repeat|i did not get that|tell me again|could you say that again)"
)
SYSTEM = (
    "(You are|you are|You're|Act as) (a|an|the) (helpful|friendly|kind|polite|clever|short-spoken|expert|{word}) "
    "(assistant|guide|ai assistant|chatbot|ai|helper|teacher|{word})(.| named {word}.| that answers questions.|)"
    "(| Answer briefly.| Be polite.| Keep answers short.| Answer in one sentence.| Always be truthful.| Help the user.)"
)

# Words that stand for anything, so that a question is not recognized by an unknown word alone.
WORDS = """house table river music garden window school doctor summer winter bridge train bottle paper market kitchen
football camera sugar mountain island forest castle engine battery money tax camel orange apple shirt shoe baby brother
sister uncle teacher student lawyer farmer soldier poet actor singer dancer movie theater church temple museum hotel
airport ship boat bus bicycle road street village town valley desert ocean beach cloud storm planet star galaxy comet
rocket robot laser magnet crystal diamond gold silver iron copper oxygen hydrogen carbon enzyme protein cell bone blood
brain heart lung liver skin hair history physics chemistry biology geography grammar essay thesis novel chapter author
painter sculpture violin guitar piano drum opera ballet tennis golf hockey marathon medal trophy champion league stock
bond bank loan salary business company startup customer product marketing insurance recipe flour butter cheese salt
pepper onion garlic tomato potato carrot banana lemon grape wine beer coffee tea juice wedding birthday party holiday
vacation passport visa embassy election party parliament minister senator law court judge crime police prison army
weapon peace treaty border refugee culture tradition festival religion myth legend hero dragon wizard ghost vampire
green small strange old modern famous ancient simple secret happy lonely quickly slowly medical legal financial
historic travel buy eat drink run jump swim fly teach paint build grow clean wash drive walk read sing"""
