# ruff: noqa: E501 (a pattern stands on one line)
"""More ways to ask about the topics of guide_topics.py, in its notation: {topic: {kind of line: patterns}}; and synonyms.

A tiny model knows a subject in other words only when it has met many: short and long ones, keywords, complaints,
stories, "can it", "what happens if".
"""

SYNONYMS = {
    "program": ("app", "tool", "software", "application"),
    "computer": ("machine", "pc", "laptop", "notebook", "workstation"),
    "start": ("begin", "launch", "open", "fire up", "get going"),
    "stop": ("halt", "end", "quit", "finish", "terminate", "prevent"),
    "see": ("view", "look at", "check", "find", "inspect"),
    "show": ("display", "tell", "present", "reveal", "give"),
    "use": ("utilize", "work with", "apply", "employ", "make use of", "go with"),
    "get": ("obtain", "have", "receive", "acquire", "find"),
    "make": ("create", "produce", "build", "have", "turn"),
    "set": ("adjust", "specify", "put", "configure", "fix"),
    "change": ("alter", "modify", "edit", "adjust", "switch", "tune"),
    "need": ("require", "have to have", "must have", "depend on"),
    "big": ("large", "huge", "massive", "enormous"),
    "small": ("little", "compact", "tiny", "light"),
    "fast": ("quick", "speedy", "rapid", "snappy"),
    "slow": ("laggy", "sluggish", "unresponsive"),
    "question": ("query", "request", "prompt", "task"),
    "answer": ("reply", "response", "output", "what it writes"),
    "answers": ("replies", "responses", "outputs", "results"),
    "model": ("llm", "ai", "language model", "network", "model"),
    "models": ("llms", "ais", "language models", "model files"),
    "text": ("words", "content", "writing", "sentences"),
    "write": ("type", "print", "produce", "say"),
    "long": ("lengthy", "wordy", "endless"),
    "good": ("sensible", "decent", "useful", "suitable", "fine"),
    "download": ("get", "fetch", "pull", "grab"),
    "run": ("execute", "start", "operate", "launch", "run"),
    "work": ("function", "operate", "go", "work"),
    "choose": ("pick", "select", "take", "go for", "decide on"),
    "explain": ("clarify", "describe", "break down", "spell out"),
    "memory": ("ram", "main memory", "memory"),
    "speed": ("performance", "throughput", "pace"),
    "chat": ("conversation", "talk", "session", "dialogue", "chat"),
    "forget": ("drop", "discard", "lose", "delete"),
    "everything": ("it all", "all of it", "the whole thing"),
    "mean": ("stand for", "signify", "tell me", "mean"),
    "happens": ("goes on", "will happen", "is the result", "happens"),
    "always": ("every time", "each time", "constantly"),
    "enough": ("sufficient", "adequate", "enough"),
    "file": ("document", "file", "file on disk"),
    "begin": ("start", "commence", "open"),
    "continue": ("go on", "carry on", "resume", "proceed", "keep going"),
    "go on": ("continue", "carry on", "resume", "proceed"),
    "resume": ("continue", "go on with", "pick up", "carry on with"),
    "stopped": ("ended", "halted", "broke off", "quit", "was interrupted"),
    "interrupted": ("stopped", "broken off", "aborted", "cancelled", "disrupted"),
    "interrupt": ("stop", "break off", "abort", "halt", "cancel"),
    "fails": ("breaks", "goes wrong", "crashes", "dies", "does not work"),
    "failed": ("broke", "went wrong", "crashed", "died", "did not work"),
    "crashes": ("dies", "breaks", "goes down", "falls over"),
    "lost": ("gone", "wasted", "missing", "away"),
    "gone": ("lost", "deleted", "missing"),
    "delete": ("remove", "erase", "throw away", "get rid of", "wipe"),
    "remove": ("delete", "erase", "take away", "get rid of"),
    "save": ("keep", "store", "preserve", "record", "persist"),
    "keep": ("save", "store", "retain", "hold on to"),
    "stored": ("kept", "saved", "put", "held", "recorded"),
    "kept": ("saved", "stored", "held", "preserved"),
    "saved": ("kept", "stored", "written to disk", "recorded", "persisted"),
    "old": ("earlier", "former", "past", "previous"),
    "last": ("latest", "previous", "most recent", "final"),
    "another": ("a different", "a second", "one more", "some other"),
    "different": ("other", "another", "distinct"),
    "list": ("show", "enumerate", "print", "name", "overview"),
    "know": ("find out", "learn", "understand", "be aware of"),
    "find": ("locate", "discover", "get", "look up", "see"),
    "where": ("in which place", "at what place", "where exactly"),
    "folder": ("directory", "dir", "path", "location"),
    "disk": ("hard disk", "drive", "ssd", "storage"),
    "laptop": ("notebook", "computer", "macbook", "machine"),
    "machine": ("computer", "box", "pc", "system"),
    "terminal": ("shell", "console", "command line", "terminal window"),
    "shell": ("terminal", "bash", "command line"),
    "script": ("shell script", "program", "cron job", "pipeline", "bash script"),
    "command": ("call", "instruction", "subcommand", "command line"),
    "option": ("flag", "switch", "setting", "parameter", "argument"),
    "flag": ("option", "switch", "setting", "parameter"),
    "options": ("flags", "switches", "settings", "parameters"),
    "flags": ("options", "switches", "parameters"),
    "settings": ("options", "preferences", "values", "configuration"),
    "default": ("standard", "usual", "normal", "preset"),
    "questions": ("queries", "prompts", "requests", "tasks"),
    "prompts": ("questions", "inputs", "queries"),
    "prompt": ("question", "input", "query", "request"),
    "lines": ("rows", "entries", "records"),
    "records": ("rows", "entries", "lines", "items"),
    "document": ("text", "file", "paper", "article", "report"),
    "summarize": ("sum up", "summarise", "condense", "give a summary of", "shorten"),
    "convert": ("turn", "transform", "change", "translate", "export"),
    "turn": ("convert", "change", "make", "transform"),
    "smaller": ("more compact", "lighter", "tinier", "reduced"),
    "shrink": ("reduce", "compress", "make smaller", "downsize"),
    "bigger": ("larger", "greater", "more capable"),
    "large": ("big", "huge", "massive"),
    "fits": ("goes", "has room", "can be held", "is small enough"),
    "fit": ("go", "have room", "be small enough", "squeeze"),
    "needs": ("requires", "takes", "wants", "consumes"),
    "takes": ("needs", "requires", "lasts", "uses"),
    "uses": ("takes", "employs", "needs", "occupies"),
    "limit": ("restrict", "cap", "bound", "confine", "constrain"),
    "force": ("make", "oblige", "constrain", "compel", "enforce"),
    "match": ("fit", "follow", "obey", "conform to", "satisfy"),
    "only": ("just", "nothing but", "solely", "merely"),
    "same": ("identical", "equal", "exact same"),
    "random": ("arbitrary", "varied", "unpredictable"),
    "creative": ("imaginative", "inventive", "original"),
    "short": ("brief", "concise", "small", "terse"),
    "shorter": ("briefer", "more concise", "less long"),
    "sentence": ("phrase", "line", "statement"),
    "word": ("term", "expression", "bit of text"),
    "error": ("failure", "problem", "fault", "mistake"),
    "wrong": ("incorrect", "bad", "amiss", "broken"),
    "broken": ("damaged", "corrupt", "defective", "unusable"),
    "code": ("number", "status", "value"),
    "returned": ("gave", "ended with", "exited with", "came back with"),
    "sent": ("transmitted", "uploaded", "passed on", "transferred"),
    "private": ("secret", "confidential", "personal"),
    "server": ("remote computer", "cloud server", "host"),
    "internet": ("net", "web", "network"),
    "online": ("on the internet", "connected", "on the net"),
    "card": ("gpu", "graphics card", "video card"),
    "processor": ("cpu", "chip"),
    "threads": ("cpu threads", "cores", "workers"),
    "cores": ("cpu cores", "processors", "threads"),
    "measure": ("determine", "test", "find out", "check", "benchmark"),
    "first": ("initial", "very first"),
    "again": ("once more", "anew", "another time"),
    "later": ("afterwards", "at another time", "some other day"),
    "tomorrow": ("next day", "another day", "the day after"),
    "leave": ("quit", "exit", "get out of", "close", "end"),
    "quit": ("leave", "exit", "close", "end"),
    "talk": ("chat", "speak", "converse"),
    "conversation": ("chat", "talk", "dialogue", "discussion"),
    "message": ("question", "line", "text", "input"),
    "history": ("past messages", "earlier talk", "log"),
    "instructions": ("rules", "orders", "directions", "guidelines"),
    "role": ("persona", "character", "part"),
    "support": ("handle", "know", "allow", "offer"),
    "supported": ("possible", "handled", "allowed", "accepted"),
    "possible": ("feasible", "doable", "allowed"),
    "specific": ("certain", "particular", "given"),
    "several": ("multiple", "many", "a few", "some"),
    "many": ("lots of", "a lot of", "numerous", "plenty of"),
    "all": ("every one of", "the whole set of", "all of"),
    "every": ("each", "any"),
    "without": ("lacking", "minus", "with no"),
    "before": ("prior to", "ahead of", "in advance of"),
    "while": ("during the time", "as", "when"),
    "halfway": ("in the middle", "midway", "half done"),
    "inside": ("within", "in", "contained in"),
    "example": ("sample", "demo", "illustration"),
    "format": ("form", "layout", "shape", "structure"),
    "number": ("count", "amount", "figure"),
    "want": ("need", "wish", "would like", "intend"),
    "tell": ("say", "inform me", "explain", "let me know"),
}
SHORTHAND = {
    "what is": ("whats", "what's", "what s", "wats"),
    "you": ("u", "you"),
    "are": ("r", "are"),
    "please": ("pls", "plz"),
    "do not": ("don't", "dont"),
    "does not": ("doesn't", "doesnt"),
    "cannot": ("can't", "cant"),
    "i am": ("i'm", "im"),
    "i would": ("i'd", "id"),
    "how do i": ("how do you", "howto", "how 2"),
    "and": ("&", "n"),
    "why": ("how come", "why exactly", "for what reason"),
    "how do you": ("how does one", "how do we"),
    "can i": ("may i", "am i able to", "could i"),
    "is there": ("do you have", "is there any", "does there exist"),
    "because": ("cause", "cuz"),
    "want to": ("wanna",),
    "going to": ("gonna",),
}

WORDINGS: dict[str, dict[str, str]] = {
    "pull": {
        "tasks": """
        {fetch} {a} {model}( from the internet| from hugging face| from the web| from the hub| online| by name| automatically| with localllm| with one command|)
        {fetch} {modelname}( from the internet| from hugging face| onto my {disk}| to my {disk}| here|)
        {fetch} (gguf files|ggufs|model files|weights|models)( from the internet| from hugging face| from the hub| onto this {disk}|)
        (get|bring|put|have) ({modelname}|a model|the weights of a model|a gguf) (onto|on|to|down to) (my|this|the) {disk}
        {fetch} {quant} (of|for) ({modelname}|a model)
        {fetch} (the|a|another) {quant} (version|variant|quant|quantization|file) (of|for) ({modelname}|a model|this model|the same model)
        (choose|pick|say|tell|name|select|specify) (the|a|which) (quantization|quant|type|file)( to download| to pull| when pulling| while downloading| of a download)
        {fetch} (several|two|many|three|a few) (models|files|ggufs)( at once| in one go| with one command|)
        {fetch} (any|some|an unknown|an arbitrary|my own|a private|a gated) (model|repository|repo|file|gguf) (from|of) (hugging face|the hub|hf)
        """,
        "commands": """
        (pull|pull qwen3-4b|pull hf:OWNER/REPOSITORY|the download command)
        """,
        "ask": """
        (which|what) (command|subcommand|word) (downloads|fetches|gets|brings|obtains|retrieves|installs|loads down) ({modelname}|a model|models|model files|weights|a gguf|gguf files)( for me| from hugging face| from the web| onto my {disk}| here|)
        (what|which) (do|should|must) i (type|run|enter|write|execute|call) to (get|download|fetch|install|have) ({modelname}|a model|gguf files|a chat model)( from hugging face| onto my {disk}| here|)
        (whats|what is|which is) the command (for|to) (download|downloading|fetch|fetching|getting|pulling|get) ({modelname}|a model|models|weights|from hugging face)
        (can|does|will|could|is) (localllm|it|this program|the program|the tool) (able to |)(download|fetch|pull|get|install) ({modelname}|models|a model|weights|a gguf)( for me| by itself| from hugging face| on its own|)
        (i|we) (want|need|would like|like to have|am looking for|want to try|want to use) {modelname}( on my {disk}| here| on this machine|)(, how do i get it|, how|, what do i type|. how do i download it| please|)
        (is there|does it have|do you have) (a|an|some) (download command|downloader|pull command|way to download models|command for downloading)
        (do i|must i|should i) (download|fetch|get) (models|files|the gguf) (by hand|manually|with curl|with wget|with a browser|with git|from a website)
        (model download|download a model|downloading models|fetch models|pull models|download {modelname}|get {modelname}|pull {modelname}|model downloader|hugging face download|download from hub)
        (how|where) (do|does) (pull|the download|downloading) work
        (what|which) (quantization|quant|file|type) (does|will) (pull|it|localllm pull) (take|download|fetch|get|choose)( by default| if i say nothing|)
        {modelname} (in|as|with) {quant}(, how do i download that|, can i pull that| please| download|)
        (i|we) (want|need|prefer|would like) (the |){quant} (and not|instead of|rather than|not) (the |){quant}( when i pull| to download|)
        (colon|slash|:q8_0|hf:|hf:owner/repository) (in|after|with|before) (pull|a name|the name)(, what does it mean|)
        (does|can) (pull|localllm pull) (take|fetch|download|get) (any|every|an unknown|a private|a specific) (repository|model|file|quantization)( from hugging face|)
        """,
    },
    "get_model": {
        "ask": """
        (where|from where|on which site|on what page) (do|would|can|could|should|might) (i|one|somebody|people|we) (get|find|discover|look for|search for|obtain|take) (models|a model|llms|weights|ggufs|good models|free models)( for this| for localllm| to try| that work here| that run here| for it|)
        (i|we) (have|got|own) (no|not a single|zero) {models}( at all| so far| yet| on this machine|)(, where do they come from|, what do i do|, what next|)
        (what|which) (is the|) (source|place|origin|home|supplier) (of|for) (models|the models|ggufs|weights)
        (localllm|it) is (installed|there|running|set up)(, but|. but| and) (where|how) do i get a model
        (installed|all set|ready)(, what is next|, and now|, now what|. which model do i get)( where do i get a model|)
        (are|do) (models|any models) (included|come with it|part of it|delivered|shipped|bundled)( with localllm| in the package|)
        """,
    },
    "pull_resume": {
        "tasks": """
        {goon} {a} (download|pull|half download|partial download|broken download|unfinished download|interrupted download|download from yesterday)
        {goon} (downloading|pulling|fetching)( a model| later| after an error| where it stopped| where i left off|)
        (avoid|not have to) (downloading|download|pulling|pull|fetching|fetch) (it all|everything|the whole file|the model) (again|anew|twice|from the beginning|from scratch)
        (check|verify|validate|be sure of) (the|a|my) (download|downloaded file|downloaded model|pulled file|checksum|hash|sha-256)
        """,
        "ask": """
        {a} (download|pull|transfer) (was|got|is|has been) {broken}( by ctrl-c| by a power cut| by the network| in the middle| halfway| at 80 percent| yesterday| by a reboot|)(, what now|, do i start again|, how do i go on|, must i begin again|, is it lost|, what can i do|. can it be resumed|)
        (my|the) (internet|connection|network|wifi|line|computer|laptop|power) (died|broke|failed|dropped|went away|crashed|was gone|hung) (while|during|when|in the middle of) (pulling|downloading|the download|i was downloading|a pull|fetching a model)(, what now|, is it all lost|, can i go on|, do i start over|)
        (what|whats) (happens|is|if|is going to happen|will happen) (if|when|after|in case) (a|the|my) (download|pull|connection|transfer) (is {broken}|fails|breaks|stops|crashes|dies|gets stuck|hangs|is lost|times out)
        (what|what happens) (if|when) i (press ctrl-c|hit ctrl-c|close the laptop|shut down|lose the connection|stop it|kill it) (during|while|in) (a|the) (download|pull|downloading|pulling)
        (can|could|is|will|does) (a|the|my) (download|pull|transfer) (be resumed|be continued|resumable|resume|continue|go on|start from zero|start again|survive a reboot|pick up where it stopped)( later| tomorrow| after a crash| after an interruption|)
        (do|must|should|will) i (have to |)(start|begin|download|pull) (again|anew|all over|from the beginning|from zero|everything again|the whole thing again)( when the download breaks| after a broken download| if the connection is lost| when pull was stopped|)
        (resume|resuming|continue|restart|broken|partial|incomplete|unfinished|interrupted|half finished) (a |)(download|downloads|pull|pulling|model download)
        (half|a part|most|80 percent|some gigabytes) of (the|my|a) (model|file|download) (is|was|has been) (there|here|downloaded|fetched|pulled)(, how do i get the rest|, how do i go on|, what about the rest|)
        (is|are|does) (the|a|) (download|downloads|downloaded file|pull|pulled file) (checked|verified|validated|safe|complete|checksummed)( at the end| afterwards| by a checksum|)
        (the|my) (download|pull) (hangs|is stuck|does not move|stopped moving|gets stuck|never ends|failed at 50 percent)(, what can i do|)
        (lost|losing) (the|my) (connection|network|wifi) (in|during|while) (a pull|a download|pulling|downloading)
        """,
        "problems": """
        (the|my|a) (download|pull) (was {broken}|broke|failed|died|crashed|stopped in the middle|did not finish|was not finished|breaks off|is incomplete)
        """,
    },
    "fit": {
        "tasks": """
        (find out|tell|see|know|check|predict|estimate|test|calculate|learn) (if|whether) ({modelname}|a {size} model|a model|a big model|the file|this model|something) (fits|will fit|would fit|runs|will run|would run|is too big|is too large|works|goes)( here| on my {disk}| in my memory| in {gigs}| before i download it| without downloading it| in advance| beforehand|)
        (estimate|predict|guess|know|foresee|calculate) (the |)(speed|tokens per second|memory|memory need|ram need|requirements) of (a model|{modelname}|a {size} model)( before i download it| in advance| without downloading| beforehand| on my {disk}|)
        (know|see|find out|learn) (how much|what) (memory|ram|space) (a|the|this|my) ({size} |){model} (needs|takes|requires|wants|will take|would take)( here| before pulling it| at 8192 tokens| with a long context|)
        (compare|see) (the|) (memory|ram) (by|for|of) (context|context length|cache type|different contexts)
        """,
        "commands": """
        (fit|fit qwen3-8b|the fit command)
        """,
        "ask": """
        (does|will|would|can|could|might) ({modelname}|a {size} model|a {size}|this model|the model|such a big model|a {quant} of {modelname}) (fit|run|work|load|go|be too big|be too large|be possible)( here| on my {disk}| on this {disk}| in my memory| into my ram| in {gigs}| with {gigs}|)
        (is|are) (my|this|the) (computer|laptop|machine|pc|ram|memory) (big|large|strong|good|powerful|beefy|sufficient) (enough|) (for|to run) ({modelname}|a {size} model|a {size}|a model|big models|this model)
        (is|are) {gigs} (enough|ok|sufficient|too little|too small|fine) (for|to run|to use) ({modelname}|a {size} model|a {size}|a model|this)
        (i|we|my laptop|my computer|this machine|the server) (have|has|got|have got|only has|only have|just has) (only |){gigs}(, which|. which|, what|, how big a) (model|models|size|model size) (fits|fit|can i run|works|will run|is possible)
        (can|could|will) (i|my {disk}|this {disk}|it|we) (run|handle|manage|load|cope with|stand|hold) ({modelname}|a {size} model|a {size}|such a model|big models)
        (how much|what|how many gb of) (memory|ram) (does|will|would|do) ({modelname}|a {size} model|a {size}|i|this model) (need|take|require|eat|use|want|cost)( for| with a long context| at 8192 tokens| here|)
        (how fast|how quick|how slow|at what speed) (will|would|might|is) ({modelname}|a {size} model|a model|this model) (be|run|go|answer|write)( here| on my {disk}| on this {disk}| before i download it| without downloading it|)
        (which|what|is there a) (command|tool|way|subcommand) (that |to |)(tells|tell|checks|check|estimates|estimate|shows|show|predicts|predict|calculates|says) (me |)(if|whether|how fast|how much memory|what memory) (a model|{modelname}|it|something) (fits|will be|needs|runs|takes|fit)( before downloading| in advance| here|)
        (before|without) (i |)(download|downloading|pull|pulling|fetch|fetching|get) (it|a model|{modelname}|gigabytes|so much|a huge file)(, how do i know|, can i see|, i want to know|, can i find out|, tell me) (if|whether) (it|the model) (fits|runs|works|is too big|will run)( here| on my {disk}|)
        (does it fit|will it fit|fits in memory|memory check|memory estimate|speed estimate|memory needed|ram calculator|vram calculator|model too big|too big for my ram|memory requirements of a model)
        (too|way too|is it too) (big|large|heavy) for (my|this) (computer|laptop|ram|memory|machine)
        (tokens per second|speed|memory) (of|for) (a model|{modelname}|a {size} model) (before|without) (downloading|download|pulling)( it|)
        (what|which) (context|context length|number of tokens) (fits|is possible|can i have|can i afford)( in my memory| with {gigs}| with this model|)
        """,
    },
    "memory": {
        "ask": """
        (what|how much) (do|does) (weights|a model|the cache|the context|a long context) (take|cost|need|add)( in memory| of memory| of ram|)
        (rule of thumb|formula|estimate) (for|of) (memory|ram|the memory)
        """,
    },
    "list": {
        "tasks": """
        {remove} {a} (model|downloaded model|pulled model|model file|old model|big model|model i do not need)( from my {disk}| from disk| again| for good| to free space|)
        {remove} ({modelname}|models|old models|all models|downloaded files|some gguf files)( from my {disk}| again| completely|)
        (free|make|gain|recover|save) (some |)(disk space|space|room|gigabytes|space on my {disk})( from models| taken by models|)
        {see} (all|the|my|) (models|ggufs|files) (that are|which are|that i have|i have|that i pulled|i downloaded) (here|on this {disk}|on my {disk}|on disk|installed|downloaded|locally|already)
        {see} (the |)(names|list|catalogue|catalog|registry) of (models|known models|available models|supported models|what can be pulled)
        {see} (which|what) models (exist|there are|are available|are known|can be pulled|can be downloaded|localllm knows|i have|i can use)
        """,
        "commands": """
        (list|ls|rm|list --all|rm qwen3-4b|the rm command|remove)
        """,
        "flags": """
        --all
        """,
        "ask": """
        (which|what) (models|ggufs|model files) (have i|do i have|did i|are|do i own|have been|were) (got|already|downloaded|pulled|here|installed|there|on my {disk}|on this {disk}|local|locally|available offline)( so far| already|)
        (which|what) (models|names) (does|do|can|could) (localllm|it|i|you|the program) (know|pull|download|have in its list|offer|recommend|choose from)( by name|)
        (which|what) (command|subcommand) (lists|shows|prints|displays|deletes|removes|erases) ({a} model|models|the models|my models|all models|downloaded models|known models)
        (is there|where is|do you have) (a|an|the) (list|overview|table|catalogue|registry) of (models|all models|known models|my models|downloaded models|models with names)
        (list|show|print|display|give|tell)( me| us|) (all|the|my|a list of|all the|every) (models|downloaded models|known models|model names|installed models|available models|local models)( please| here| you know| that exist|)
        (i|we) (do not|dont|no longer) (need|want|use) (this|a|the|that|one) {model}( any more| anymore| anymore, how do i delete it| any longer|)(, how do i remove it|, how do i get rid of it|, delete it|)
        (my|the) (disk|drive|ssd|hard disk) is (full|almost full|nearly full|too small)(, how do i remove models|, which model can i delete|, what can i delete|, how do i delete a model|)
        (models|{modelname}) (take|takes|takes up|uses|occupies) too much (space|room|disk)( on my {disk}|)(, how do i remove it|, what can i do|)
        (list models|model list|installed models|downloaded models|known models|delete model|remove model|delete {modelname}|remove {modelname}|uninstall {modelname}|available models|my models|models on disk|models by name|ollama list|local models)
        (can|may|could|how can) i {remove} (a model|models|{modelname}|what i pulled|what i downloaded|a downloaded file)( again| by hand| later|)
        (how many|how big are the) models (do i have|are here|are on my {disk}|did i pull|have i downloaded)
        (what|which) is (already |)(downloaded|pulled|on my {disk}|here|installed)( so far| by now|)
        """,
    },
    "folder": {
        "ask": """
        (where|in which folder|in which directory|at which path) (are|is|do|does|did) (the|my|) (pulled models|downloaded models|models|pull|downloads|model files|a downloaded model) (stored|kept|saved|put|go|land|end up|live|lie|located)( on my {disk}| on disk| after a pull| by pull|)
        (where|in which folder) (does|will|did) (pull|localllm pull|localllm|it) (put|save|store|write|keep|leave|place) (the|its|my|) (models|files|downloads|model|gguf)
        (path|location|folder|directory) (of|for|with) (the |)(models|downloaded models|pulled models|downloads)
        """,
        "tasks": """
        (change|set|move|choose|use another) (the|) (folder|directory|place|location|path) (of|for|where) (the |)(models|downloads|pulled models|models are kept|models go)
        (store|keep|put|save) (the |my |)(models|downloads|pulled models) (on another disk|in another folder|elsewhere|on an external drive|on a different drive|on a usb disk)
        """,
    },
    "map": {
        "tasks": """
        (answer|ask|process|run|put|handle|work through|go through|send|feed|get answers to|get an answer to|do) {lots} {records}( in one go| at once| in a batch| with one command| overnight| automatically| from a file|)
        (process|answer|work through|run over|go through|ask about|handle|feed it) (a|my|the|every line of a|each line of a|all lines of a|a whole) (file|jsonl|jsonl file|csv|txt file|list|text file|data set|dataset|table) (of|with|full of) {records}
        (apply|use|run|ask) (one|the same|a single|a) (prompt|question|instruction|template) (to|on|for|about) (every|each|all|many|thousands of) (line|record|row|text|item|lines|records)( of a file| in a file| of my file|)
        (classify|rate|label|summarize|translate|tag|score|sort|rewrite) {lots} {records}( with a model| in a batch| from a file|)
        (run|start|do|make|launch|have) (a|an|some) (batch|batch job|batch run|bulk job|mass run|offline batch|job over a file)( with localllm| of prompts| over night|)
        {goon} (a|the|my) (batch|batch job|map|map run|batch run|job)( after an interruption| where it stopped| after ctrl-c| tomorrow| after a crash|)
        """,
        "commands": """
        (map|map model.gguf questions.jsonl|the map command|map -o)
        """,
        "ask": """
        (i|we) (have|got|own|need to process|must answer|want to ask) (a|one|this|an excel export|) (file|list|csv|table|jsonl|dataset|text file) (of|with|containing) ({lots} |){records}(, what now|, how do i ask them|, how do i process it|, can it answer them all|. which command|. how|, what do i use|)
        (i|we) (have|got|need|want) (answers|an answer|replies|results) (to|for) {lots} {records}(, how|, what command|, what do i do|)
        {lots} {records}(, how do i| how do i|, can it) (ask them|answer them|run them|process them|put them through the model|do that)( all| at once| in one go|)
        (what|which) (command|subcommand|tool) (is for|does|handles|answers|processes|works on|runs) (batches|batch jobs|many prompts|a file of prompts|lots of questions|a whole file|every line|jsonl)
        (can|does|could|will) (localllm|it|this|the program) (do|handle|run|answer|process|support|read) (batches|batch|{lots} {records}|jsonl|a file line by line|many prompts at once|bulk requests|prompts in parallel)
        (what|how) (is|should|must|does) (the|) (input|input file|file|input of map|jsonl|record|line)( of map| for map| for a batch|) (look|look like|be written|have to look|be formatted|contain|have)
        (which|what) (fields|format|keys|columns|structure) (does|do|should|must|can) (map|the input of map|a record|a map record|the lines|the input file|the batch file|the output of map) (have|need|take|expect|want|accept|contain)
        (does|can|may) map (take|read|accept|use|understand|eat|work with) (plain text|text files|csv|json|jsonl|stdin|lines|a txt file|messages|conversations)
        (what|which) (does|do|is) (map|the map command|a batch) (write|print|output|produce|give|return)( for every line| for each record| per line| in the output|)
        (what|what happens) (if|when) (a batch|map|the batch|my batch job|the map run) (is {broken}|stops|crashes|dies|fails|breaks|is killed|hits ctrl-c)
        (will|does|can|is|could) (a batch|map|the batch|my batch|a map run) ({goon}|start again|begin again|be resumed|be continued|start over|be interrupted|survive a crash|lose everything)( where it stopped| after a crash| after ctrl-c| later| after a reboot| when i start it again|)
        (do|must) i (start|begin|run) (the batch|map|everything|all records) (again|anew|from the beginning|from scratch)( when it was stopped| after an interruption| after a crash|)
        (batch|batches|batch job|batch processing|batch mode|bulk|jsonl|many prompts|one prompt per line|line by line|mass processing|process a file line by line|answer many questions|prompt list)
        (resume|continue|restart|interrupted|broken|crashed|stopped) (a |the |)(batch|map|batch job|map run)
        (how|where) (do|can) i (see|find|put|get) the (answers|results|output) of (map|a batch|the batch)
        """,
    },
    "schema": {
        "tasks": """
        {enforce} (the|an|its|all|every|my|) (answer|answers|output|reply|replies|model) (to be|to fit|to follow|to match|to obey|to conform to|into|to have|to look like|by) (json|valid json|a schema|a json schema|a grammar|a pattern|a regular expression|a regex|a format|a structure|a given form|a fixed form|an object with fields|one of three words|a list of choices|a number|a date)
        (get|have|receive|produce|want|generate|obtain) (only |)(valid json|json|strict json|clean json|structured answers|structured output|structured data|an object with fields|json with certain fields|json objects|a json array|a number only|a date only|one word only|yes or no)( by a schema| that fits a schema| from the model| as the answer| back|)
        (limit|restrict|reduce|confine|narrow) (the|its|an|) (answer|answers|output|reply|choice|choices) to (yes or no|true or false|a few words|some words|one of several words|a list of words|fixed choices|two options|given options|positive or negative|digits|numbers|certain words|a set of labels)
        (make|let|have) (the model|it|the answer|the ai) (say|answer|reply|print|choose|answer with|pick|output|return|be) (only|just|nothing but|exactly) (yes or no|true or false|a number|one word|a date|an integer|one of a few words|json|a phone number|a label|a|b or c|digits|an email address)
        (use|write|give|pass|apply|load) (a|my|the|an|) (json schema|schema|grammar|gbnf|gbnf grammar|gbnf file|regex|regular expression|pattern|pydantic model)( for the answer| to constrain the answer| file|)
        (extract|pull out|read) (fields|data|names and dates|structured data|values|a table) (from|out of) (a text|texts|documents|an email) (as|into|in) json
        """,
        "flags": """
        (--json-schema|--grammar|--regex|-j|-jf|--grammar-file|--json-whitespace)
        """,
        "things": """
        (a json schema|gbnf|gbnf grammars|a gbnf grammar|guided decoding|constrained decoding|constrained generation|structured outputs|grammars|a regex for the answer|guided generation)
        """,
        "ask": """
        (is|are) (there|it possible to have|) (any |)(support for|a way for|an option for|something like|anything like) (json schemas|a json schema|grammars|gbnf|regular expressions|regexes|structured output|constrained output|pydantic|guided decoding|choices|yes or no answers)
        (do|does|can|will|could) (you|it|localllm|this|run|map) (know|support|understand|take|accept|have|handle|follow|read|do|use) (json schemas|a json schema|schemas|gbnf|grammars|a grammar|llama.cpp grammars|regular expressions|regex|structured output|constrained output|pydantic models)
        (which|what) (flag|option|switch|setting) (is for|takes|makes|gives|sets|forces|enforces|guarantees|limits|restricts) (a json schema|json by a schema|a schema|a grammar|gbnf|a regular expression|a regex|the form of the answer|structured answers|valid json|the answer to yes or no|the answer to some words|the format)
        (i|we|my program|my script) (want|need|needs|require|would like|expect|must have) (the answer|answers|the output|the model|it) (to be|as|in|to match|to have) (valid json|json with fields|an object|a given format|a fixed format|yes or no|a number|one of three words|a pattern|a certain pattern|a schema|a structure)(, how|, is that possible|, how do i do that|)
        (only|just|nothing but|exactly) (yes or no|true or false|a number|digits|one of these words|valid json|a date|a single word|one label|positive or negative|one of four options)( please| as the answer| as output| allowed|, how|, can that be done|)
        (the model|it|my model) (does not|doesnt|never|rarely|often fails to) (give|return|write|print|keep to|produce) (valid json|the right format|proper json|the format i want|my format|the json i asked for)
        (can|could|may) (the|an|its) (answer|answers|output|reply) be (forced|restricted|constrained|limited|made|confined|guaranteed)( to be| to match| to fit| to|) (json|a schema|valid json|a grammar|a regex|a pattern|yes or no|one word|some words|a number|a list of options)
        (json schema|json-schema|gbnf|gbnf grammar|grammar|grammars|regex|regular expression|structured output|constrained|constrained decoding|yes no answer|enum answer|pydantic|schema|choices|force json|valid json|fixed format)
        (output|answer|answers|reply) (format|pattern|structure|schema|grammar|must match|matching a regex|matching a pattern|following a schema)
        (something|a text|an answer|output) (that|which) (matches|fits|follows|obeys|looks like) (a regular expression|a regex|a pattern|a schema|a grammar|a phone number|a date|my schema)
        """,
    },
    "sessions": {
        "tasks": """
        (save|keep|store|record|preserve|remember|archive|write down) (a|the|this|my|our|all my|what we said in a|) (chat|conversation|talk|dialog|session|chats|conversations|discussion)( for {later}| to disk| in a file| until {later}| on my {disk}| and go on {later}|)
        (go on|continue|carry on|resume|pick up|proceed|reopen|come back to|return to) (with |)(a|the|my|our|an old|the last|an earlier|a previous|yesterdays|last weeks|a saved|a stored|the latest) (chat|conversation|session|talk|dialog|discussion)( {later}| where i left| where we stopped| from yesterday|)
        {see} (a list of |all |)(my|the|old|saved|stored|kept|earlier|past) (chats|conversations|sessions|dialogs|talks)
        {remove} (a|an|the|my|one|all) (saved|stored|old|kept|recorded) (chat|conversation|session|sessions|chats)( from disk| for good| file|)
        (export|print|read again|look at|reread) (a|an|the|my) (saved|stored|old|earlier|past|finished) (chat|conversation|session)
        """,
        "flags": """
        (--session|--continue|--session trip)
        """,
        "commands": """
        (sessions|sessions show|sessions rm|sessions list|the sessions command)
        """,
        "things": """
        (sessions|a session|saved chats|the sessions of chat|/save|/load|/sessions)
        """,
        "ask": """
        (can|could|is it possible to|may|how can) (i|we) (close|leave|quit|stop|end|interrupt) (the chat|the terminal|it|this|a conversation|now) and (go on|continue|come back|resume|carry on) {later}
        (is|are|was|will) (my|the|our|a|this) (chat|conversation|chats|conversations|session|talk|dialog) (be |)({saved}|lost|gone|forgotten|deleted)( automatically| when i quit| when i leave| when i close the terminal| after exit| by default| somewhere| anywhere|)
        (where|in which folder|in which file|at what place) (are|is|do|does|can i find) (my|the|our|saved|stored|old|all|) (chats|conversations|sessions|chat|conversation|session files|session|chat files)( {saved}| go| stored on disk| kept on my {disk}| located| lie|)
        (which|what) (flag|option|command|switch) (saves|keeps|stores|continues|resumes|reopens|lists|shows|goes on with|loads|restores) (a|the|my|the last|an old|a saved|all) (chat|conversation|session|chats|sessions|conversations)
        (i|we) (want|would like|need|wish|hope) to (keep|save|continue|resume|go on with|come back to|finish) (this|my|our|the|yesterdays|the last|a) (chat|conversation|session|talk|discussion)( {later}|)
        (lets|let us|please|can we|could we) (go on with|continue|resume|pick up|carry on with|finish) (yesterdays|the last|our|my|the previous|an old|the latest|our earlier) (chat|conversation|session|talk|discussion)
        (what|which) (did we|chats do i|sessions do i|conversations do i|sessions) (talk about yesterday|have|have saved|are there|exist|kept)
        (does|will|can) (localllm|it|the chat|chat|the program) (save|keep|remember|store|record|log|write) (my|the|our|) (chat|conversation|chats|conversations|session|talks)( after i leave| between starts| for {later}| on disk| automatically|)
        (tomorrow|next week|later|after lunch|another day) (i|we) (want|would like|need|have) to (go on|continue|resume|keep talking|pick up)( with this chat| where we stopped| here|)
        (saved chats|saved conversations|list sessions|chat sessions|session|sessions|--session|--continue|resume chat|continue chat|save chat|save conversation|chat history on disk|old chats|delete session|last session|previous conversation|persistent chat|keep chat|chat log)
        (continue|resume|reopen|load|restore) (the |my |)(last|latest|previous|old|saved|most recent|yesterdays) (session|chat|conversation|one)( please| again|)
        (is there|do you have) (a|some|any) (way|option|command|flag) (to|for) (keep|keeping|save|saving|continue|continuing|resume|resuming) (a chat|chats|conversations|a conversation|sessions)
        """,
    },
    "platforms": {
        "ask": """
        (does|will|can|could|would|may|should|did) (localllm|it|this|the program|this tool|one|the software) (run|work|start|go|function|install|be used|be installed|be run|compile) (on|under|in|with) {os}( too| as well| also|)
        (can|could|may|is it possible that|how do) i (use|run|install|start|try|have|get) (localllm|it|this|the program|this tool|this software) (on|under|in|with) {os}
        (is|are) {os} (supported|ok|fine|enough|possible|a supported platform|on the list|good enough|any good|tested)( here| by localllm| for this|)
        (is|are|do|does) (there|you|it|localllm) (have |)(a|an|any|some) (version|build|release|port|package|installer|edition|support) (for|on|of) {os}
        (i|we|my boss|my friend|my company) (have|has|use|uses|am on|own|work on|work with|only have|run|bought) {os}(, does it work|, will it run|, can i use it|, is that ok|, is that supported|, what now|. does localllm run there|. can i use it|)
        (what|how) about {os}
        {os} (support|supported|compatible|compatibility|version|build|users|installation|works|ok|users welcome)
        (which|what) (operating systems|operating system|os|platforms|platform|systems|kinds of computers|computers|machines) (does it|does localllm|can i|do i|are|is|will it|may i) (run on|work on|support|use|need|supported|required|possible|have)
        (windows|linux|mac) (or|and|and also|,) (mac|linux|windows)( or linux|)
        (does|will|is) (it|localllm|this) (need|require|only run on|only for|only work on|made for|limited to|bound to) {os}
        (mac|linux|windows|apple|arm|raspberry|m1|m2) (owner|user|users|fan|person|people) (here|can use this|asking)
        (which|what) (processors|chips|cpus|machines) (does it run on|can it run on|will it start on)(, arm too|, apple too|, also arm|)
        (apple silicon|apple chips|m-series chips|arm processors|arm cpus|64 bit arm|intel and amd|arm boards) (supported|work|ok|too|possible|as well)
        """,
    },
    "quantize": {
        "tasks": """
        (make|get|turn|bring|reduce|shrink|squeeze|compress|boil down|scale down|pack) ({a} |)(f16|bf16|fp16|f32|16 bit|full precision|big|huge|original|unquantized|large) (model|gguf|file|weights) (smaller|down|into {quant}|to {quant}|to 4 bits|to four bits|to 5 bits|to 8 bits|to fewer bits|in size|into a small file)
        (quantize|quantise|compress|shrink|reduce) ({modelname}|a {size} model|my gguf|a gguf file|an f16 file|a bf16 gguf)( to {quant}| to 4 bits| to 8 bits| with localllm| on my {disk}| myself|)
        (make|create|produce|write|generate) (a|an|my own|) {quant} (file|version|model|gguf|quant)( of my model| from f16| from bf16| out of a big file| myself|)
        (save|free) (memory|ram|space|disk space) by (quantizing|making the file smaller|compressing the model)
        """,
        "ask": """
        (which|what) (command|subcommand|tool) (makes|turns|reduces|brings|converts) (a|my|the|an) (big|huge|f16|bf16|16 bit|large|full) (model|file|gguf) (small|smaller|into a small one|to {quant}|to 4 bits|down to size)
        (from|f16|bf16|16 bit|fp16|f32) (f16 |bf16 |)(to|into|->) ({quant}|4 bits|four bits|8 bits|int4|int8)
        (is there|do you have|does it have) (something like|an equivalent of|a replacement for|) (llama-quantize|a quantizer|a quantization command)
        (my|the) (f16|bf16|16 bit|fp16) (model|file|gguf) (is|takes) (too big|too large|huge|14 gb|16 gb|enormous|too slow)
        (smaller file|make it smaller|shrink model|quantize f16|compress gguf|4 bit version|8 bit version|reduce model size|make a q4_k_m|own quantization|llama-quantize)
        """,
    },
    "convert": {
        "tasks": """
        {turn} ({a} |){checkpoint} (to|into|in) (gguf|a gguf|a gguf file|a model file|one file|a single file|something localllm can run|a quantized model|{quant})
        {turn} (hugging face|huggingface|hf|pytorch|transformers|safetensors) (weights|models|files|checkpoints|tensors) (to|into) (gguf|gguf files|a gguf|a model file)
        (quantize|quantise|load|open|use|run|import|take|try) ({a} |){checkpoint}( directly| as it is| here| with localllm| in one step|)
        (use|run|try|load|quantize|convert) (a|my|our|the) (fine-tuned|finetuned|self trained|trained|own|merged|custom) (model|checkpoint|weights)( from transformers| from pytorch| from unsloth| with localllm| here|)
        (make|create|get|build|produce|write) (a |)gguf( file|) (from|of|out of) ({a} |){checkpoint}
        """,
        "ask": """
        (i|we) (have|downloaded|got|cloned|trained|fine-tuned|saved) (a|the|my|some) {checkpoint}(, now what|, what now|, how do i use it|, how do i run it|, what do i do with it|, can localllm use it|. how do i get a gguf|. what next|)
        (can|does|will|could|is) (localllm|it|the program|quantize|localllm quantize) (able to |)(convert|read|take|open|import|handle|use|understand|accept|eat) ({a} |){checkpoint}( directly| as input| itself|)
        (do|must|should|will) i (need|have|use|install|run|call) (llama.cpp|convert_hf_to_gguf.py|a converter|pytorch|transformers|torch|another tool|an extra script|a separate program|a conversion script) (for|to|before) (convert|converting|conversion|make a gguf|get a gguf|turning weights into gguf|hugging face models|safetensors|the conversion)
        (is|are) (pytorch|transformers|llama.cpp|a converter|a conversion script|another program|extra software) (needed|required|necessary|used) (for|to) (convert|converting|conversion|a checkpoint|safetensors|make a gguf)
        (which|what) (command|tool|subcommand) (converts|turns|makes|takes|reads|imports) ({a} |){checkpoint}( to gguf| into gguf| into a gguf file|)
        (what|how) (about|do i do with|to do with|can i do with) ({a} |){checkpoint}
        (how|can) (do i|i|one) (get|come|go) from ({a} |){checkpoint} to (gguf|a gguf|a gguf file|a model that runs|{quant})
        (a folder|a directory|my folder|the folder) (with|of|containing|full of) (safetensors|safetensors files|config.json and safetensors|shards|tokenizer.json|a hugging face model|weights from hugging face)(, how do i run it|, what do i do|, can i use it|, how do i convert it|)
        (safetensors to gguf|convert safetensors|hf to gguf|checkpoint to gguf|convert_hf_to_gguf|convert checkpoint|convert hugging face model|pytorch to gguf|import safetensors|finetuned model|own fine-tune|model.safetensors|tokenizer.json|config.json|.safetensors|checkpoint folder)
        """,
    },
    "config": {
        "tasks": """
        (set|store|save|keep|change|define|write down|put|make|have|fix) (my|the|some|own|permanent|standard|favourite|favorite|personal|usual|) (default|defaults|default options|options|settings|preferences|flags|values|standard options)( once| for good| for always| permanently| in a file| forever| once and forever| for every start| for all commands| for one model| for each model|)
        (always|permanently|automatically) (use|have|set|get|run with|start with) (the same|my|a certain|low|4|8192|another) (temperature|threads|context|options|settings|flags|system prompt|default model|seed)( without typing it| by default| every time| from now on|)
        (avoid|stop|get around|not have to|save) (typing|repeating|writing|type|repeat|write) (the|my|all|all the) (same |)(options|flags|settings|arguments|parameters)( every time| again and again| each time| always| over and over|)
        (choose|set|change|have) (a|the|my|another) (default model|standard model|model that is used by default|default temperature|default context)
        {see} (which|what|the) (defaults|settings|options|configuration) (hold|are active|are used|i have|are in force|apply)
        """,
        "ask": """
        (is there|does it have|do you have|where is|does localllm read|wheres) (a|the|any|some) (config|config file|configuration|configuration file|settings file|preferences file|ini file|toml file|dotfile|rc file)
        (where|how|in which file) (do|can|should|would|are) (i|my|the|one) (put|set|write|store|keep|change|save|edit|configure) (my|the|own|permanent|) (defaults|settings|preferences|options|configuration|standard values)
        (where|in which file) (are|is|do) (the|my|) (settings|defaults|options|preferences|configuration|config) (stored|kept|saved|go|live|written)
        (i|we) (always|every time|constantly|keep) (type|have to type|write|typing|use|repeat|pass) (the same|these|so many|-t 4 and) (options|flags|settings|arguments)(, can i save that|, is there a shortcut|, can i set them once|, can that be avoided|)
        (can|could|may) (i|options|defaults|settings|flags|the temperature|the context) (be |)(set|have|stored|saved|kept|configured) (permanently|once|for good|in a file|by default|for every run|per model|for one model|as defaults|forever|for all commands)
        (config|config file|configuration|configure|settings|preferences|defaults|config.toml|default options|default model|permanent settings|environment variables|LOCALLLM_THREADS|LOCALLLM_MODEL|toml)
        (which|what) (environment variables|variables|variable) (are there|does it read|does localllm use|can i set|sets the threads|sets the model)
        (from now on|by default|always|every time) (i want|use|i would like|it should use|it should take) (temperature 0|4 threads|a larger context|my model|the same system prompt|fewer threads|this model)( without saying so|)
        """,
    },
    "aliases": {
        "tasks": """
        (give|assign|make|define|set|create|have) (a|my|the|own) (model|file|gguf)( a|) (short name|nickname|alias|another name|own name|shorter name)
        (call|name|use) (a|my) model by (a short name|another name|a nickname|an own name)
        (avoid|stop) typing (the|a) (long|whole|full) (path|file name|name)( of a model|)
        """,
    },
    "elsewhere": {
        "tasks": """
        (switch|move|change|come|migrate|port my scripts) (over |)(from|away from) (ollama|llama.cpp|llama-cli|lm studio|llama-server) (to localllm|to this|)
        (use|run|paste|reuse|translate) (a|my|an old|some) (llama.cpp|llama-cli|ollama) (command|command line|script|commands|options|line)( here| with localllm|)
        """,
        "ask": """
        (i|we) (come|came|am coming|switched|moved|migrated|switch) from (ollama|llama.cpp|llama-cli|lm studio|llama-server|ollama run)(, what|. what|, which|. how|) (is different|changes|is the same|do i type now|command do i use|do i have to know|is what|)
        (i|we) (know|used|use|am used to|have used|always used|normally use) (ollama|llama.cpp|llama-cli|ollama run|llama-server|the llama.cpp tools)(, what is it here|, what do i type here|, how do i do that here|, what is the same here|, is it similar|, what is different|)
        (what|which) (is|command is|would be|are) (the|like|similar to|the same as) (equivalent|counterpart|replacement|same|substitute|translation|) (of|to|for|as|) (ollama run|ollama|ollama pull|llama-cli|ollama list|ollama show|llama.cpp|llama-bench|ollama create|llama-cli -m)( here| in localllm|)
        (do|does|will|can|are|would) (the |my |)(llama.cpp|llama-cli|ollama|llama cpp) (options|flags|arguments|commands|command lines|scripts|parameters|switches|names) (work|run|the same|function|be used|exist|valid|understood|known|supported|accepted)( here| too| as well| in localllm| with localllm|)
        (instead of|in place of|rather than) (ollama run|llama-cli|ollama|llama.cpp|ollama pull)( what do i type| what do i use|)
        (ollama run|llama-cli|ollama|llama.cpp|ollama commands|llama.cpp options|llama-cli options|ollama equivalent|coming from ollama|coming from llama.cpp|ollama vs localllm|llama.cpp vs localllm|ollama user|llama.cpp user)( here| in localllm|)
        (is|are) (it|localllm|this|the options|the flags|the names) (compatible|the same|similar|identical|like) (with|as in|to|as|in|) (llama.cpp|llama-cli|ollama|llama cpp)
        (how|what) (is|does|do) (localllm|it|this) (different|differ|compare|relate)( from| to|) (ollama|llama.cpp|llama-cli|lm studio)
        (can|may|could) i (copy|paste|use|take|reuse|keep) (a|my|the|my old) (llama.cpp|llama-cli|ollama) (command|command line|options|flags|commands|script|tutorial)( here| unchanged| as it is|)
        (i|we) (have|found|copied|pasted) (a|an|this) (llama.cpp|llama-cli|ollama) (command|command line|tutorial|script)(, does it work here|, what do i change|, will it run|)
        """,
    },
    "undo": {
        "tasks": """
        (take back|undo|revoke|retract|cancel|withdraw|reverse|unsay|remove|delete) (the|my|a|what i said in the|) (last|latest|previous|wrong|) (question|message|turn|prompt|thing i said|thing i wrote|line|input|answer|exchange)( in a chat| in the chat| in this chat| again|)
        (change|edit|correct|fix|rewrite|reword|rephrase|modify|improve) (my|the|a) (last |latest |previous |)(question|message|prompt|input|typo|thing i wrote)( in a chat| in the chat| after sending it| again|)
        (go|step|get) back (one|a|two|three) (step|turn|turns|question|questions|message|messages)( in the chat| in a conversation|)
        """,
        "ask": """
        (is there|do you have) (an|a|some) (undo|undo command|way back|undo key|way to take something back)( in the chat| in chat|)
        (i|oops i|sorry i) (made|wrote|typed|asked|sent|said) (a mistake|a typo|the wrong thing|something wrong|nonsense|the wrong question|something stupid)( in the chat| in my question| just now|)(, can i change it|, how do i take it back|, can i undo that|, can i correct it|)
        (undo|take back|take that back|edit last message|correct my question|undo last question|revert|step back|change my last question|undo 3)
        (can|could|may|how can) (i|one) (undo|take back|edit|change|correct) (what i|something i|the thing i|a question i|a message i) (said|wrote|typed|asked|sent)( before| last| in the chat|)
        (what|whats) (does|is|happens with|happens when i type) (/undo|/edit|undo|slash undo)( do| for|)
        """,
    },
    "retry": {
        "tasks": """
        (get|have|see|ask for|try|request) (another|a different|a new|a second|a better|one more) (answer|reply|response|version|try)( to the same question| to my last question| in a chat| in the chat| to that|)
        (regenerate|redo|repeat|renew|try again|retry) (the|an|its) (last |)(answer|reply|response|generation)( in a chat| in the chat|)
        (go on with|continue|finish|complete|extend) (a|an|the|its) (cut|cut off|stopped|interrupted|truncated|broken off|unfinished|last) (answer|reply|response|text)( in a chat| in the chat|)
        """,
        "ask": """
        (regenerate|retry|try again|another answer|other answer please|give me another answer|new answer|redo|regenerate answer|second try)
        (i|we) (do not|dont) like (the|this|that|its) (answer|reply)(, can i have another|, try again|, how do i get another one|)
        (can|could) (it|the model) (go on|finish|continue|answer again|try again|write the rest)( with the answer| in a chat| after ctrl-c|)
        """,
    },
    "branch": {
        "tasks": """
        (fork|branch|split|copy|duplicate) (a|the|my|this) (chat|conversation|talk|session)
        (try|follow|go) (two|different|other|another|several) (directions|ways|paths|direction|path|continuations)( of| in|) (a|the|my) (chat|conversation)
        (go back to|switch to|list) (a|another|the|my) (branch|branches)( of a chat| of the conversation|)
        """,
    },
    "read_file": {
        "tasks": """
        (send|give|show|put|load|read|attach|bring|use|include|paste) (a|my|the|some|a long) (file|document|text file|letter|text|article) (in|into|to|during|within|inside|while in) (a|the|my|this) chat
        (attach|upload|add) (a|my|some) (file|document|text|txt file)( to my question| to the chat| in a chat|)
        (discuss|talk about|chat about|ask about) (a|my|the) (file|document|text) in (a|the) chat
        """,
        "ask": """
        (can|how can) (the|a) chat (read|see|use|open|take) (a|my) (file|document|text file)
        """,
    },
    "slash_set": {
        "tasks": """
        (change|set|adjust|modify|turn|alter) (the |an |)(temperature|options|option|settings|top-k|seed|max tokens|sampling) (in|inside|during|within|while in|in the middle of) (a|the|my|this|a running) (chat|conversation)
        {see} (the|which) (options|settings|values) (in|inside|of|during) (a|the|my|this) (chat|conversation)
        """,
        "ask": """
        (can|may|could) i (change|set|adjust) (the temperature|options|settings|something|the seed) (without leaving|while in|inside|during) (the|a) chat
        """,
    },
    "slash_model": {
        "tasks": """
        (switch|change|swap|exchange|replace) (the|to another|to a different|to a bigger) model (in|inside|during|within|while in|in the middle of|without leaving) (a|the|my|this) (chat|conversation)
        (continue|go on with) (the|a|my|this) (chat|conversation) with (another|a different|a bigger) model
        """,
    },
    "server": {
        "ask": """
        (is there|does it have|do you have|does localllm have|can it start|can i start|how do i start|how do i run|where is) (a|an|the|some) (server|api server|http server|rest api|web server|openai api|openai compatible server|endpoint|server mode|web interface|web ui|daemon|service|http api)
        (can|could|does|will|how can|how do) (other programs|my app|another computer|several users|my website|openwebui|it|localllm|clients|a browser) (connect|connect to it|connect to localllm|use it over http|serve requests|listen on a port|serve models|act as a server|be a server|talk to it over the network|call it over http)
        (server|serve|http|rest api|openai api|openai compatible|llama-server|ollama serve|web ui|web interface|api server|port 8080|localhost|endpoint|daemon|background service)
        """,
        "tasks": """
        (start|run|launch|host|open|have|set up) (a|an|the|my own) (server|api server|http server|web server|openai compatible server|openai api|endpoint|rest api|web interface|service)( with localllm| for my app|)
        (serve|host|offer|provide) (a|the|my) (model|models|llm) (over http|on the network|as an api|to other programs|to other computers|on a port|for a web app)
        """,
    },
    "lora": {
        "tasks": """
        (use|load|apply|add|run|merge|put in) (a|an|my|the|) (lora|adapter|lora adapter|qlora|peft adapter|adapter file)( file| with a model| to a model|)
        """,
        "ask": """
        (does|can|will) (it|localllm|this) (support|load|have|use|take|apply) (lora|loras|adapters|lora adapters|peft)
        (i|we) (have|trained|made) (a|an|my own) (lora|adapter|qlora)(, how do i use it|, what now|, can i use it here|)
        """,
    },
    "thinking": {
        "tasks": """
        (turn on|turn off|switch off|disable|enable|stop|limit|hide|show|shorten|skip|suppress) (the|its|a models|) (thinking|reasoning|thoughts|thought process|chain of thought|think part|thinking part)( of a model|)
        (make|let|have) (it|the model|a model) (think|reason)( less| more| longer| first| before it answers| not so long|)
        (keep|prevent|stop) (it|the model) from (thinking|reasoning)( so long| so much| aloud|)
        """,
        "ask": """
        (the model|it|qwen|deepseek) (thinks|reasons|is thinking|keeps thinking) (too long|too much|forever|for minutes|aloud|before answering|on and on)(, how do i stop that|, can i turn that off|, can i limit that|)
        (does|can|do) (it|localllm|models) (support|handle|show|have|know) (thinking|reasoning|reasoning models|thinking models|thoughts|think tags)
        (what is|whats|why is there) (the text|dim text|a think tag|<think>|grey text)( before the answer| in the answer|)
        (thinking|reasoning|think|no think|thoughts|reasoning budget|think budget|chain of thought|<think>)
        """,
    },
    "speculate": {
        "tasks": """
        (use|turn on|enable|turn off|disable|try) (speculative decoding|speculation|a draft model|a small model to speed up a big one|ngram speculation|guessing)
        (speed up|accelerate) (a|the|my) big model with (a|the) (small|smaller|draft|tiny) (model|one)
        """,
        "ask": """
        (does|can) (it|localllm) (do|support|have|use) (speculative decoding|speculation|draft models|a draft model|lookahead decoding|assisted generation)
        """,
    },
    "kv_type": {
        "tasks": """
        (quantize|compress|shrink|reduce|make smaller) the (kv cache|cache|key value cache|kv-cache)( to 8 bits| to 4 bits| type|)
        (set|change|choose|use) (the|another|an 8 bit) (type of the kv cache|type of the cache|kv cache type|cache type|kv cache|cache quantization)
        (save|need less) memory (in|for|with) (long contexts|a long context|the cache|the kv cache)
        """,
        "ask": """
        (the|my) (kv cache|cache|context) (is too big|takes too much memory|needs too much ram|eats my memory)
        """,
    },
    "kept_prompts": {
        "tasks": """
        (avoid|prevent|not|stop) (reading|reread|rereading|processing|process) (a|the|my|the same) (long |)(prompt|document|system prompt|text) (again|twice|every time|each time|anew)
        (reuse|cache|keep|remember) (a|the|my|long) (long |)(prompt|prompts|prefix|document|system prompt)( between runs| for later runs| on disk|)
        (delete|clear|empty|list|see|remove) (the|my|all|) (kept prompts|prompt cache|cached prompts|prefix cache)
        """,
        "ask": """
        (does|will|is) (it|localllm|the same prompt|a long prompt) (read|process|cached|kept|read again|cache prompts|remember prompts) (every time|twice|between runs|from run to run|on disk|again)
        (the second|my second|every later) (run|question|start) (with|about) (the same|a long|the same long) (prompt|document|text) (is|was) (quick|fast|quicker|much faster)(, why|)
        """,
    },
    "replay": {
        "tasks": """
        (prove|show|document|check|verify) (how|where|that) (an|the|my) (answer|text|output|result) (was made|came from|came about|can be made again|is reproducible)
        (make|write|save|keep|use) (a|the) (receipt|record|protocol) (of|for) (an|the|my) (answer|run|output)
        (repeat|reproduce|replay) (an|a|the|my) (old|earlier|recorded|exact|previous) (answer|run|result)( from a receipt| later| exactly|)
        """,
    },
    "several": {
        "tasks": """
        (get|have|ask for|generate|print|see|make|want) (several|many|three|five|two|more than one|multiple|different|a few) (answers|replies|variants|alternatives|candidates|completions|suggestions|versions)( to one question| to a prompt| at once| for one prompt| in one run|)
        (use|turn on|try) (beam search|beams|best of n|several candidates)
        """,
        "ask": """
        (can|does) (it|run|localllm) (give|print|make|have|do) (several|three|multiple|many|more than one) (answers|alternatives|variants|candidates|beam search)( at once| to one prompt|)
        """,
    },
    "overflow": {
        "ask": """
        (what|what happens) (if|when|once|as soon as) (the|my|a) (context|conversation|chat|context window) (is full|gets full|is too long|runs full|gets too long|is exhausted|fills up|overflows|has no more room|is used up)
        (the|my) (context|chat|conversation) (is full|ran full|is used up|became too long|overflows)(, what now|, what can i do|, what happens|)
        (does|will) (it|the chat|chat) (forget|drop|lose|shift|cut) (old|older|the oldest|the first|early) (turns|messages|questions|parts)( when the context is full|)
        (context shift|full context|context overflow|context full|rolling context|sliding the context)
        """,
        "tasks": """
        (drop|forget|shift out|remove) (the |)(oldest|old|first|early) (turns|messages|parts)( when the context is full| automatically|)
        (go on|chat on|continue) (endlessly|forever|without end|when the context is full)
        """,
    },
    "device": {
        "tasks": """
        (choose|set|say|select|pick|change) (what|which device|which card|which gpu) (computes|is used|does the work|to use)
        (put|move|load|offload|bring|send|push) (some |all |10 |the |)(layers|layer|the model|everything|half of the model|weights) (on|onto|to|into) (the|my|a) (gpu|card|graphics card|vram|nvidia card)
        (use|run on) (only |just |)(the cpu|my cpu|the processor|cuda|my nvidia card|the second gpu)( and not the gpu| and not the card|)
        """,
        "ask": """
        (which|what) (flag|option|switch) (is for|chooses|sets|puts|moves|offloads) (the gpu|the device|the graphics card|layers on the gpu|layers to the gpu|gpu layers|the number of gpu layers|cuda)
        (how many|which) layers (go|are|should i put|can i put|fit) (on|onto) (the|my) (gpu|card|graphics card)
        (ngl|-ngl 99|-ngl 0|gpu layers|offload|offloading|gpu offload|layers on gpu|device cpu|cuda device)
        """,
    },
    "completion": {
        "tasks": """
        (complete|autocomplete|tab-complete|have tab complete) (commands|options|model names|localllm commands|names)( with tab| in bash| in zsh| in fish| in my shell|)
        (install|get|set up|turn on|enable) (tab completion|shell completion|autocompletion|completions|bash completion|zsh completion|fish completion)
        """,
        "ask": """
        (does|can) (tab|the tab key|bash|zsh|fish|my shell) (complete|work|know) (commands|options|localllm|localllm commands|the options)
        """,
    },
    "markdown": {
        "tasks": """
        (render|show|display|format|see) (markdown|headings and lists|the markdown|code nicely|formatted answers|formatted text|code blocks)( in a chat| in the chat| in the terminal|)
        """,
        "ask": """
        (there are|i see|why are there) (stars|asterisks|hashes|** and #|backticks) in (the|its) (answer|answers|text)
        """,
    },
    "exit_7": {
        "ask": """
        (why|what does it mean that|what if) (the|my|an) (answer|json|json answer) (with a schema|with a grammar|by a schema|under a regex) (was|is|got) (cut|incomplete|cut short|not complete|invalid)
        (the|my) (json|json answer|structured answer|schema answer) (is|was|came out) (cut|incomplete|cut off|not finished|broken)(, why|)
        """,
    },
    "exit_6": {
        "ask": """
        (some|a few|two|three|many) (records|lines|prompts|questions) (of|in) (map|my batch|the batch|the file) (failed|have errors|were not answered|could not be answered|have an error)(, what now|, why|)
        (what|what happens) (if|when) (a|one|some) (record|records|line|lines) (of a batch|in map|of the input|of map) (fails|fail|is broken|cannot be answered|has an error)
        """,
    },
    "exit_5": {
        "ask": """
        (why|what if|what does it say when) (it|localllm|the program) (has|finds|gets|meets) not enough memory
        """,
    },
    "exit_codes": {
        "ask": """
        (which|what) (code|number|status|value) (means|stands for|is returned for|tells|says|signals) (failure|an error|success|not enough memory|a wrong option|a broken model|usage|what)
        (table|list|overview|meaning|all) of (the |)(exit codes|exit statuses|return codes|return values|error codes|statuses)
        (does|do|are) (localllm|it|the command|there) (have|use|return|set|any) (exit codes|meaningful exit codes|return codes|an exit status|different exit codes)( for scripts| for errors|)
        (exit codes|return codes|exit status|error codes|status codes|return values|exit statuses)( list| table| overview| meaning| explained| please| of localllm|)
        (how|with what|by what) (do|can|does) (my script|i|a shell script|a program|cron|make) (react to|handle|check for|distinguish|recognize|catch|find) (errors|failures|an error|a failure|different errors)
        (give|tell|show|name|explain|list)( me| us|) (all|every|the) (exit code|exit codes|return codes|statuses|error codes|exit statuses)( at once| there are| please| it has|)
        """,
    },
    "flag_n": {
        "tasks": """
        (stop|prevent|keep|hinder) (it|the model|the ai|my model) from (writing|saying|producing|talking|generating) (too much|so much|pages and pages|endless text|long texts|a whole essay|more than i need|for minutes|hundreds of lines)
        (get|have|want|receive) (only |just |)(a few|ten|twenty|fifty|100|one or two|some) (tokens|words|sentences|lines)( as the answer| of text| out of it| from the model|)
        (cut|end|stop|finish) (the|an|its) answer after (a number of|some|100|50|200|a hundred) tokens
        (make|let) (the|an|its) (answer|text|story|reply) (longer|shorter|not so long|go on|end earlier|complete|not stop in the middle)
        """,
        "problems": """
        (the|an|every|each|my|its) (answer|text|reply|story|summary|output) (is|was|gets|ends up|comes|seems) (cut off|cut|chopped|clipped|truncated|broken off|incomplete|unfinished|not finished|too short|half)( in the middle of a sentence| in mid sentence| in the middle of a word| after some words| at the end| before the end|)
        (the|an|its|my) (answer|text|reply|story|output|sentence) (stops|ends|breaks off|finishes|is over|just stops|just ends|suddenly stops) (in the middle of a word|mid sentence|halfway through|without an end|after one line|after a few words|unfinished|after some tokens|too soon)
        (the last|its last|the final) (sentence|word|line|paragraph) (is|was|comes) (missing|incomplete|cut off|cut|not finished)
        (it|the model) (writes|produces|generates|prints|talks) (way too much|far too much|endless text|pages of text|a novel each time|on and on|without stopping|forever)
        """,
        "ask": """
        (maximum|max|limit|upper limit|number) (of |)(tokens|length|output|answer length|words|output tokens|new tokens|answer tokens)( of an answer| of the answer|)
        (answer|output|reply) (length|limit|too long|too short|cut off|incomplete|maximum)
        """,
    },
    "flag_f": {
        "tasks": """
        (summarize|summarise|translate|explain|check|proofread|analyze|shorten|rewrite|answer questions about|process|read|digest) (a|my|this|the|some|a long) (file|text file|document|article|letter|report|log file|text|paper|email|story|page of text)( on my disk| with a model| from disk| on the command line| for me|)
        (give|feed|hand|pass|show|send) (the model|it|run|localllm|a model) (a|my|the|some) (file|text file|document|report|long text|notes|article|letter)
        (use|take|read|load) (a|my|the) (file|text file|document|txt file) (for|as) (the|a|my) (prompt|input|question)
        """,
        "ask": """
        (can|could|does|is|will|would) (localllm|it|run|the model|this) (able to |)(read|summarize|summarise|take|open|process|translate|use|explain|proofread|look into|work with) (a|my|the|this|text|long|whole) (file|text file|document|letter|article|files|documents|text files|report)( from disk| on my disk| and summarize it| and answer questions about it| for me|)
        (prompt from a file|prompt in a file|text file as prompt|read file|summarize file|file as input|long prompt in a file|document input|summarize a document|txt input)
        """,
    },
    "flag_sys": {
        "tasks": """
        (give|assign|hand|set|pass|write) (the model|it|run|the ai|a model) (a|an|some|general|standing|permanent|basic) (role|persona|character|instruction|instructions|rule|rules|system prompt|behaviour|style|tone)( on the command line| with run| for one answer| with a flag| with an option|)
        (make|let|have|get) (the model|it|the ai|my model) (behave|act|talk|speak|write|answer|respond|sound) (like|as) (a|an|my) (teacher|pirate|lawyer|poet|doctor|child|robot|friend|expert|{word})( always| in every answer| with run|)
        (make|let|have|get) (the model|it|the ai) (always|only|never) (answer|speak|write|talk|reply) (in german|politely|in one sentence|formally|shortly|in verse|in french|in capitals)
        """,
        "ask": """
        (system prompt|system message|persona|role prompt|instructions for the model|model role|system prompt option|system prompt flag|personality|standing instructions|set persona|act as)( on the command line| with run| flag|)
        """,
    },
    "flag_seed": {
        "tasks": """
        (get|have|make|obtain|want|produce) (always |)(the same|identical|equal|reproducible|repeatable|exactly the same|stable) (answer|answers|output|results|text|words|reply)( each time| every time| on every run| with every start| again and again| for the same prompt| twice|)
        (make|let|have) (it|the model|run|localllm|the answers|the output|my script) (always |)(say the same|give the same answer|be deterministic|be reproducible|answer the same thing|produce the same text|be repeatable)( each time| every time|)
        """,
        "ask": """
        (every|each) (run|time|start|call) (gives|brings|i get|it says|produces|has) (another|a different|something else|a new|other) (answer|text|output|result|words|)( for the same prompt|)(, how do i change that|, why|, can that be fixed|)
        (deterministic|reproducible|repeatable|same|identical|constant) (output|answers|results|answer|runs|text|answer every time)( possible| please|)
        """,
    },
    "privacy": {
        "ask": """
        (does|do|is|are|will|would|can|could) (anything|something|any of it|what i type|what i write|my input|what i say|my words|my prompt|any data|some of it|my secrets|a word of it) (get |be |)(sent|uploaded|leave|transmitted|shared|leaked|logged|stored|go|shown)( to a server| to the cloud| to the internet| to somebody| my computer| anywhere| out of my computer| to a company| over the network| home|)
        (can|could|does|will|may) (my boss|anybody|somebody|a company|the government|the makers|you|hackers|my provider|anyone|someone|a third party) (see|read|watch|know|log|intercept|look at|follow|get) (what i ask|what i type|what i write|my questions|my chats|my prompts|the conversation|my texts)( the model| here| with it|)
        (do|does|is|are) (you|it|localllm|the program|this|the chat) (talk to|contact|connected to|sending to|report to|connect to|phone|call) (a server|the cloud|somebody|home|your makers|a company|any servers|the internet)( about me| with my data|)
        (how|is it) (private|secret|confidential|safe|secure) (is it|is this|is localllm|with my data|for my data|are my chats)
        (may|can|should) i (type|enter|paste|use|write) (secrets|passwords|patient data|customer data|private things|confidential text|company secrets|personal letters|my diary)( here| into it| in a chat|)
        """,
    },
    "gpu": {
        "ask": """
        (do|would|must|should|will) i (need|have|buy|get|own|use|want) (to have |to buy |)(a|an|some|the|) (nvidia|amd|intel|radeon|geforce|rtx|expensive|special|dedicated|strong|gaming|discrete|big) (gpu|card|graphics card|video card|graphics|graphics chip|hardware|accelerator)( for this| for that| for localllm| to run it| at all|)
        (is|are) (a|an|) (nvidia|amd|dedicated|discrete|) (gpu|card|graphics card|video card) (needed|required|necessary|a must|obligatory|useful|used|optional|mandatory)( for this| here| at all|)
        (without|no|lacking|missing) (a |an |any |)(gpu|graphics card|nvidia card|cuda|video card)(, does it work|, is that a problem|, can i run it| is that ok|)
        (my|this) (laptop|computer|machine|server|pc) (has|comes with|contains) (no|only an integrated|just an intel|a weak|an old) (gpu|graphics|graphics card|video card)(, does it work|, is that ok|, will it run|)
        """,
    },
    "python": {
        "tasks": """
        (use|call|run|import|embed|drive|control|invoke|integrate|ask) (localllm|it|a model|the model|this) (from|in|within|inside|out of|by) (python|a python program|my python script|python code|my python code|a jupyter notebook|a python app|a python function)
        (write|build|create|make|develop) (a|an|my own) (python program|python script|application|chatbot|bot|app|tool) (that uses|with|around|on top of) (localllm|a local model|a model)
        (generate|get|produce) (text|answers) (in|from|with) (python|a python script|python code)
        """,
        "ask": """
        (show|give|tell|explain)( me| us|) (how|some code|an example|a snippet|code|the code|sample code) (to|for|that|of) (call|use|import|load|run|open|generate text with) (it|localllm|a model|this)( from| in| with|) python
        (python|python program|python code|python script|jupyter|notebook|import) (example|usage|api|sample|snippet|interface|bindings|library|module|localllm|how)
        (can|could|does|is) (python|my python program|a script in python|a notebook) (call it|use it|use localllm|import localllm|load a model|talk to the model|talk to it)
        (sample|example|demo|a little|some) (code|snippet|program|script)( for| in| with|) (python|the python api|importing it|the api)( please|)
        """,
    },
    "first_start": {
        "ask": """
        (why|how come|for what reason) (did|does|was|is|has) (the|my) (first|very first|initial|first ever) (start|launch|run|call|time|use|answer|chat|execution) (take|so slow|slow|need|last|taken|run|be|last so long|so long|take ages|take a minute|take this long|need so much time|take forever|slower than later ones|hang for a while)
        (the|my) (first|very first|initial) (start|launch|run|call|answer|chat|execution|startup) (was|is|took|takes|lasted|needed|seemed|felt) (slow|so slow|very slow|long|ages|a minute|half a minute|forever|stuck|much slower|slower than the second)(, why|, is that normal|, what did it do|, what happened|)
        (it|localllm) (says|prints|shows|writes|tells me) (that it compiles|compiling kernels|that it is compiling|something about kernels|compiling kernels for this computer)(, what is that|, why|)
        (is|will) (the|every|each) (second|next|later) (start|run|launch) (faster|quicker|as slow|be faster|be quicker|be as slow)
        """,
    },
    "flag_json": {
        "tasks": """
        (get|have|print|receive|write|see|want|produce) (the|an|my|its|) (answer|output|result|results) (in|as) (a form|a format|something|a way) (that |which |)(programs|a program|another program|scripts|jq|my script|other tools|software|machines) (can|could) (read|parse|understand|process|use)
        (see|get|print|have) (the|all|) (token counts|finish reason|seed|timings|numbers|details) (of an answer|as json|with the answer|for a program)
        """,
        "ask": """
        (machine readable|machine-readable|parseable|parsable|structured|programmatic) (output|answer|result|form|format|answers)( for a script| for jq| for another program|)
        (i|we|my script|my program|another tool|jq) (want|need|wants|needs|must|has to|have to|should) (to |)(parse|read|process|evaluate|understand|consume) (the|its|an) (answer|output|result|results)
        (how|can) (can |)(a program|another program|my script|jq|software) (read|parse|understand|process|use) (the|its|an) (answer|output|result)( of run| of localllm|)
        (output|answer|result) (that|which|for) (my |)(jq|script|program|another program|a parser|software)( can|) (digest|parse|read|understand|process|use)
        """,
    },
    "gguf": {
        "ask": """
        (what|which things|which data) (is|are|do i find|does one find) (in|inside|within|part of|stored in|contained in) (a|the|one of these|these|those|such a|one of those) (gguf|ggufs|gguf file|gguf files|.gguf|model file|model files)
        (what|how) (are|is|does) (these|those|a|the|such) (gguf|ggufs|gguf files|.gguf files|gguf file) (made of|built|good for|for|contain|consist of|hold|look inside|structured)
        (inside|contents of|anatomy of|structure of|definition of|meaning of|what about) (a |the |)(gguf|gguf file|gguf files|gguf format|.gguf)
        (contents|content|inside|parts|structure) of (a|the|one|such a) (gguf|gguf file|model file|.gguf)
        """,
    },
    "about": {
        "ask": """
        (i|we) (just |only |have just |)(installed|downloaded|found|got|started|discovered) (this|localllm|this thing|this program|it)(, and|, but|. so|,) (what|what exactly|whats) (is it|does it do|is it for|can it do|can i do with it|is it good for|is it meant for|is the point)
        (what|what exactly|what the heck) (is|does|can) (this|localllm|this thing|it) (actually |really |)(good for|for|do|about|be used for|there for|useful for|help with)
        (purpose|use|point|benefit|idea) of (this|localllm|this thing|this program)
        (localllm|this program|this tool|it) in (one|a|two) (sentence|word|sentences|line|nutshell|tweet)
        (short|brief|quick|one line|one sentence) (description|summary|overview|introduction|pitch|explanation) (of|for) (localllm|this|this program|it)
        (pitch|sell|introduce|summarize|present) (localllm|this program|it)( to me| in one sentence|)
        """,
    },
    "which_quant": {
        "ask": """
        (i|we) (am|m|are) (unsure|not sure|undecided|confused|lost|new|uncertain) (which|what|about the) (quant|quantization|type|quants|version|file|quantization type)( to take| to download| to use| to choose| is right|)
        (which|what) (quant|quantization|type|one|file|q) (is|would be|do you|should i|would you) (a safe choice|a good start|a good default|recommend|the safest|sensible|the usual one|a good compromise|start with|best to begin with|the sweet spot|take first)( for a beginner| for most people| if i do not know| when in doubt|)
        (when|if) (in doubt|unsure|i do not know|i am unsure|not sure)(,|) (which|what) (quant|quantization|type|file) (do i|should i|would i) (take|use|grab|choose|pick|download)
        (best|good|recommended|usual|default|safe) (quant|quantization|quantization type|quants)( for a start| for most| to begin with| for a laptop|)
        """,
    },
    "kv_cache": {
        "ask": """
        (what|whats) (is|does|about) (the|a|this|that) (kv cache|kv-cache|key value cache|kv thing) (for|good for|do|used for|there for|contain|hold|store|about|help with|keep)
        (why|what for) (is there|do models have|does a model need|do we need|does it have|have) (a|the) (kv cache|kv-cache|key value cache)
        """,
    },
    "clear": {
        "ask": """
        (please |) (forget|drop|ignore|erase|wipe|delete) (it all|all this|what we said|what we discussed|what we have talked about|everything we said|what i told you|all we talked about|the conversation so far|this topic|all of this)(, i want to start anew|, lets start again|, i want a new start|, and start fresh|. new topic|)
        (i|we) (want|would like|need|should have) (a|to have a|to make a|) (fresh|new|clean) (start|beginning|slate|conversation|chat)(, forget all this|, without the old messages| please| without leaving|)
        (lets|let us|can we|i want to|we should) (start|begin) (fresh|anew|from the beginning|from zero|over again|a new conversation|with a clean slate)
        (empty|new|fresh|clean|blank) (conversation|chat|history|context|slate)( please| now|)
        (start over|begin anew|reset chat|clear chat|clear history|forget all|reset conversation|clear conversation|new topic)( please| now|)
        """,
        "tasks": """
        (start|begin) (over|again|anew|fresh|from zero) (with|in) (an|a) (empty|new|fresh|clean) (conversation|chat|history|context)
        """,
    },
    "leave": {
        "ask": """
        (i|we) (am|m|are) (done|finished|through|ready)( chatting| talking| with the chat| with this|)(,|.|) (how|where|what) (do i|can i|is the way) (get out|leave|close this|exit|quit|to get out|press|type|end it)( of here| of this| of the chat| now|)
        (how|where) (do|can) (i|one) (get out|escape|leave|go out|close this|end this|quit this|come out)( of here| of this| of it| again|)
        (let me|get me|i want) out( of here| of this| please|)
        (quit|exit|leave|close|end|stop|finish|get out|bye|go)( chat| the chat| now| please| this|)
        (how|where) (quit|exit|leave|out)
        """,
    },
    "ctrl_c": {
        "ask": """
        (what|what happens|what will happen|whats) (if|when|happens if|happens when) (i|one|you) (press|hit|type|push|use) (ctrl-c|ctrl+c|ctrl c|control-c|control c) (while|during|when|in the middle of|as) (it|the model|an answer|the answer|it is writing|it writes|it answers|the model talks|it talks)( is talking| is writing| is speaking| speaks| comes| is being written|)
        (does|will|can) (ctrl-c|ctrl+c|control-c) (stop|end|kill|leave|close|interrupt|quit|abort) (the answer|the chat|it|the program|everything|only the answer|the model)
        (interrupt|stop|abort) (the answer|answer|an answer|generation|output|it now|the text)( please| now| early|)
        """,
        "tasks": """
        (interrupt|stop|break off|cut short|abort|halt|silence) (a|an|the|this|its) (long|running|endless|boring|current|too long|bad) (answer|reply|text|story|generation|output)( in a chat| while it comes|)
        """,
    },
    "bench": {
        "tasks": """
        (measure|find out|determine|see|know|test|tell|check|benchmark) (how many tokens per second|how many tokens a second|how fast|the tokens per second|the real speed|what speed) (i get|it makes|my computer makes|a model makes|it runs|it is|my model has|the model writes|i have here)( on my computer| here| exactly|)
        (compare|measure) (the |)(speed|performance) (with|of|on|by) (1, 2 and 4 threads|different threads|two quantizations|two machines|prompt and answer)
        """,
    },
    "internet": {
        "ask": """
        (can|could|may|does|will) (i|it|localllm|one) (use it|work|run|be used|chat|start) (on a train|on an airplane|in a basement|on an island|in the mountains|with the network off|in flight mode|without being online|on an isolated machine|behind a firewall)
        (when|for what|why) (does|do) (it|i|localllm) (need|use|require) (the internet|a connection|the network|to be online)
        (works|work|usable|runs|possible|ok|fine|useful) (on|in) (a plane|an airplane|a train|a cabin|the wild|a basement|a submarine|the desert)(, offline| without internet| without a network|)
        (offline|without internet|without a network|no connection|air-gapped|in flight mode|disconnected)( possible| use| ok| works|)
        """,
    },
    "flag_t": {
        "ask": """
        (how many|what number of) (threads|cores|cpu threads|cpu cores|processors) (does|will|is|are) (it|localllm|run|used|taken|the program) (use|take|occupy|need|used|by default|run with)( by default| normally| if i say nothing| without a flag| unless i set it| on its own| automatically|)
        (default|standard|usual|normal) (number of |)(threads|thread count|cores|number of cores)
        (threads|cores|cpu cores|thread count|number of cores)( setting| option| used| by default| limit|)
        """,
        "tasks": """
        (run|work|compute|answer) (on|with) (one|two|three|four|six|8|half the|fewer|only some|all) (core|cores|threads|processors)( only|)
        (leave|keep|spare) (some|two|half of the) cores (free|for other programs|alone)
        """,
    },
    "flag_raw": {
        "tasks": """
        (stop|keep|prevent|hinder) (it|localllm|run|the program) from (wrapping|changing|formatting|using|applying|putting|adding|touching|rewriting) (my prompt|the prompt|the chat template|a template|the template|anything to my prompt|a chat template)( in a template|)
        (give|send|pass|feed) (my|the|a) (prompt|text) (as it is|unchanged|verbatim|literally|without a template|without formatting|directly|untouched)( to the model|)
        """,
    },
    "chat": {
        "ask": """
        (how|where) (do|can) (i|one) (talk|chat|speak) (to|with) (a|the|my) (model|llm|ai|gguf)( in the terminal| here|)
        """,
    },
    "pipe": {
        "ask": """
        (does|is|can) (stdout|the output|standard output) (only|just) (have|contain|hold|the answer)( the answer|)
        (can|could|how can) (i|a shell script|my bash script|cron|a makefile) (use|call|run|ask) (localllm|a model|run|it) (in a loop|for every file|from cron|in a pipeline|inside a script|in a shell script)
        """,
    },
    "help": {
        "ask": """
        (which|what) (options|flags|settings) (does|do|can) (run|chat|map|quantize|a command|each command|the commands) (have|take|know|accept|understand)
        (where|how) (are|do i find|can i see|is) (all |)(the |)(options|flags|switches|parameters) (of|for) (run|chat|a command|map|quantize)
        """,
    },
    "split": {
        "ask": """
        (how|can|where) (do i|i) (load|use|start|open|run) (a|the|my) (model|gguf) (in|of|made of|with) (several|many|two|three|multiple|5) (files|parts|pieces|shards)
        (my|the|this|a) (model|gguf|download) (came|comes|is|arrived|was) (in|as|split into|divided into|made of) (2|3|4|5|two|three|four|several|many) (pieces|parts|files|shards|ggufs)(, what do i do|, how do i load it|, which one|, is that ok|)
        """,
    },
    "history": {
        "ask": """
        (does|do|will|can) (it|the chat|you|the model) (know|remember|recall) (my name|my first question|what we talked about|the beginning|what i told it) (later|in the same chat|two questions later|until the end|during the chat)
        """,
    },
    "which_model": {
        "ask": """
        (which|what) (model|llm|size) (suits|is right for|fits|is good for|would suit|goes with) (a beginner|my old laptop|a laptop|me|summaries|writing|a weak computer|translation|everyday questions)
        (good|best|recommended|sensible|first) (model|llm)( for me| for a laptop| for a beginner| for a start| to start with| for 8 gb| for 16 gb|)
        """,
    },
    "nonsense": {
        "ask": """
        (why|what if|what do i do when) (does the model|it|the model|my model|it suddenly) (write|writes|say|says|print|prints|produce|produces|talk|talks) (nonsense|garbage|rubbish|gibberish|strange things|strange words|wrong facts)
        """,
    },
    "unknown": {
        "ask": """
        (can|could|does|will) (it|localllm|a model here|this) (make|create|paint|edit|show|understand|transcribe|play) (images|pictures|videos|audio|speech|podcasts|pdf files|excel files)
        """,
    },
    "load_model": {
        "tasks": """
        (start|use|open|run|load|try|launch) (a|the|my) (file|gguf|gguf file|model file) (that |which |)(i downloaded|i have here|i already have|is on my disk|from my downloads|in another folder|somebody gave me)
        (talk|chat) (to|with) (the|a|my) (file|gguf|model) (i downloaded|i pulled|i have on disk|in my downloads folder)
        """,
        "ask": """
        (ive|i have) (a|the|this|some) (gguf|gguf file|model.gguf) (here|on disk|in a folder|from a friend|already)(, how do i talk to it|, what do i type|, how to start it|. and now|)
        (what|which) (path|argument|name) (do i|must i|should i) (give|pass|type|write) (to|for) (use|start|load) (my own|another|a local) (model|gguf|file)
        (load|open|use|start) (model|gguf|my gguf|local file|local model|model.gguf)
        """,
    },
    "install": {
        "tasks": """
        (get|have|put|set up|bring) (localllm|it|this) (running|installed|working|up and running|onto my machine)( with pip| from source| in a venv| on a fresh machine|)
        (install|set up|build|deploy) (localllm|it|this)( with pip| from source| in a virtual environment| without root| without a compiler|)
        """,
        "ask": """
        (pip|venv|virtual environment|python version|compiler|installation|installing|install|setup)( needed| steps| instructions| how| guide| of localllm|)
        (which|what) python (is|does it) (need|needed|required|want|enough)
        (do i|must i) (compile|build) (it|something|anything)( myself| first|)
        """,
    },
    "commands": {
        "ask": """
        (list|overview|table|names|set|number) of (the |all |)(commands|subcommands|things it can do on the command line)
        (what|which) (can|may|could) (come|stand|follow|be typed) (after|behind) localllm
        (subcommands|commands|command overview|available commands|all the commands)( please| of localllm| list|)
        """,
    },
    "architectures": {
        "ask": """
        (is|are|does|can|will) (it|there|localllm) (run|load|support|understand|know|for|read|work with) (mixtral|qwen3|qwen moe|gemma 3|gpt-oss|llama 4|deepseek v3|mamba|phi 4|olmo|granite|command r|glm|falcon|a mixture of experts|moe models|recurrent models)( too| models|)
        (which|what) (families|architectures|kinds|models) (of models |)(run|work|are supported|are known|can i run|are possible)( here|)
        (supported|known|possible) (architectures|families|models)( list|)
        """,
    },
    "run": {
        "tasks": """
        (ask|pose|put) (a|one|a single|just one|a quick) question (and|then) (get out|exit|leave|be done|return to the shell|quit)
        (get|have|print) (one|a single|just one) answer (in|on|from|to) (the terminal|a script|the shell|stdout|the command line)
        """,
        "ask": """
        (one shot|single|one|quick|non-interactive) (answer|question|prompt|mode|use|run)( from the shell| and exit| without a chat|)
        """,
    },
    "run_or_chat": {
        "ask": """
        (what|which) (is|are) (better|the difference|different|right for me)(, | between | )(run|chat) (or|and|vs) (chat|run)
        (do|does) (run and chat|chat and run) (do the same|differ|behave differently)
        """,
    },
    "inspect": {
        "tasks": """
        (see|read|print|show|find|look up|dump|list) (the |all |)(metadata|tensors|tensor names|parameters|architecture|vocabulary size|chat template|details|header|layers) (of|in|from) (a|the|my|this) (gguf|file|model|gguf file|model file)
        (check|test|verify) (whether|if|that) (a|my|the) (gguf|model file|file) (is|was) (ok|intact|valid|complete|undamaged)
        """,
        "ask": """
        (metadata|tensors|header|details|facts|info) (of|about|in) (a|my|the|this) (gguf|model|model file|file)
        """,
    },
    "tokenize": {
        "tasks": """
        (count|know|see|find out|measure|tell) (how many|the number of) tokens (a|my|this|the) (text|prompt|file|document|book|sentence) (has|takes|makes|is|costs|contains)
        (see|show|print) how (a|the|my) (text|sentence|word|prompt) is (tokenized|cut|split|divided|cut into tokens)
        """,
        "ask": """
        (token count|count tokens|token counter|number of tokens|tokens in a text|tokenizer|tokenization|tokenize text|token ids)( of a text| of a file| please|)
        """,
    },
    "warmup": {
        "tasks": """
        (compile|build|prepare|make) (everything|all kernels|the kernels|the machine code) (before|ahead|in advance|earlier|while installing|beforehand|before the first use)
        (make|have) the first (start|run|answer) (quick|fast|faster)
        """,
    },
    "imatrix": {
        "tasks": """
        (collect|make|compute|create|measure|gather|produce|use) (an|the|my own) (importance matrix|imatrix)( from a text| for quantizing| with localllm| for a model|)
        (improve|raise|get better) (the |)quality of (small|low bit|2 bit|3 bit|strongly quantized) (files|models|quants|quantizations)
        """,
        "ask": """
        (importance matrix|imatrix|importance matrices|--imatrix)( please| explained| how| file| quantization|)
        """,
    },
    "perplexity": {
        "tasks": """
        (measure|see|find out|know|quantify|tell) (how much|what) (quality|accuracy|precision) (is lost|was lost|i lost|the quantization cost|quantizing costs|the small file has lost)( by quantizing| after quantizing|)
        (compare|measure|score|judge) (the |)(quality|perplexity|kl divergence) of (two files|two quantizations|a small and a big file|my quantized file|a model)
        """,
        "ask": """
        (perplexity|ppl|quality loss|kl divergence|quality of a quantized file|loss by quantization)( measurement| measure| test| of a model| how|)
        """,
    },
    "flag_p": {
        "ask": """
        (prompt|question|text) (on|in|from) (the |)(command line|command|shell|terminal)( flag| option| how|)
        """,
    },
    "flag_temp": {
        "tasks": """
        (get|have|make|want|produce) (more|less) (imaginative|creative|random|original|inventive|sober|varied|strict|boring|predictable|wild|playful|conservative) (answers|output|text|replies|stories|results|writing)
        (make|let|have) (it|the model) (more|less) (imaginative|creative|inventive|random|fanciful|sober|strict|predictable|original|factual)
        """,
        "ask": """
        (temperature|temp|creativity|randomness|imagination)( setting| value| option| higher| lower| up| down|)
        """,
    },
    "flag_c": {
        "tasks": """
        (have|get|use|set|give it|choose|want) (a|an) (window|context|context window|context length) (of|with) (2k|4k|8k|16k|32k|8192|16384|32768|100000|many) (tokens|)
        """,
        "ask": """
        (context|window|context window|context length) (of |)(4k|8k|16k|32k|64k|8192|16384)( tokens| please| how|)
        (longer|larger|bigger|more|smaller|shorter) (context|context window|memory of the chat|window)( please| how|)
        """,
    },
    "flag_r": {
        "tasks": """
        (end|stop|finish|cut) (generation|the answer|the output|it|writing) (at|before|when it reaches|on|as soon as it meets) (a stop word|a stop string|a certain text|a blank line|a given string|###|the word end)
        """,
        "ask": """
        (stop word|stop string|stop sequence|stop text|stop at a word|stop words|reverse prompt|end at a word)( option| flag| how|)
        """,
    },
    "flag_stats": {
        "ask": """
        (timings|statistics|timing|duration|tokens per second|numbers) (of|after|about|for) (a|an|my|the|this) (run|answer|start|call|reply)
        """,
    },
    "slash_system": {
        "tasks": """
        (change|set|give|replace) (the|a|my|new) (system prompt|instruction|persona|role|instructions) (while chatting|during a chat|in a running chat|without leaving the chat|in the chat)
        """,
    },
    "slash": {
        "ask": """
        (commands|things i can type|words with a slash|special commands|slash) (in|inside|during|for) (a|the|this) (chat|conversation)
        """,
    },
    "quantization": {
        "ask": """
        (what|why) (does|do|is|are) (quantized|a quantized model|quants|quantizing|quantization) (mean|for|do to a model|good for|smaller|used)
        """,
    },
    "q4_k_m": {
        "ask": """
        (is|does) (q4_k_m|q4|four bits|4 bits) (any good|good|too lossy|lossy|enough|worse|lose much|okay|reasonable|usable|suffice)( for me| for most|)
        (q4_k_m|q4km|q4) (quality|good|size|explained|meaning|bits)
        """,
    },
    "requantize": {
        "ask": """
        (from|a) (q8_0|q6_k|q5_k_m|quantized file|quant) (file |)(to|into) (q4_k_m|q4_0|another quant|q3_k_m)(, is that ok|, possible|, any loss|)
        """,
    },
    "less_memory": {
        "ask": """
        (i|we) (have|got) too little (memory|ram)( for my model| for it|)(, what can i do|, what helps|)
        (need|use|take|save) less (ram|memory)( how| please|)
        """,
    },
    "slow": {
        "ask": """
        (tips|tricks|advice|ideas|help|hints)( for| to get| about|) (speed|more speed|slow answers|slowness|making it faster|a slow model)
        (so|very|too|terribly|awfully|unbearably|really) slow(, why|, tips|, what can i do|, help|, any tips| here|)
        (crawls|crawling|lags|drags|snail|like a snail|takes forever|takes ages|slow as hell)
        """,
    },
    "hardware": {
        "ask": """
        (avx|avx2|avx-512|avx512|vnni|neon|amx)( needed| used| support| required|)
        (old|older|ancient) (cpu|processor|processors|cpus)(, does it work| without avx| supported|)
        """,
    },
    "license": {
        "ask": """
        (may|can|am i allowed to) (i |)(sell|publish|use commercially|use at work|redistribute) (what a model writes|a model|the weights|models|answers)
        (license|licence|terms|copyright) (of|for) (a|the) (model|models|weights)
        """,
    },
    "cost": {
        "ask": """
        (free|gratis|for free|free of charge|paid|expensive|price|fee|subscription)( software| of localllm| or not| to use|)
        (do i|must i|does one) (have to |)(pay|register|sign up|subscribe|buy something|give my credit card)( to use it| for this|)
        """,
    },
    "stream": {
        "ask": """
        (do|does|will) (i|it|the text|the answer) (see|show|appear|come) (word by word|token by token|piece by piece|bit by bit|at once|live)
        """,
    },
    "thanks": {
        "ask": """
        (thanks|thx|thank you|ty|cheers|tysm|great|wonderful|nice)(,|!| -|) (great|really|very|big|good|so|super|excellent|lovely) (help|helpful|kind|nice|answer|useful|job|work)
        (thanks|thx|thank you)(, | )(that|this|it|you) (helped|was helpful|is great|works|solved it|did it|was great|are helpful|are great|have been kind)( a lot| me| much|)
        (you|youve|you have) (been|were|are) (of |)(very |really |so |quite |a |)(helpful|great help|kind|useful|big help|great|patient)( to me| today| thanks|)
        """,
    },
    "who": {
        "ask": """
        (good morning|good evening|hello|hi|hey|hey there|good day)(,|!|.|) (who|what) (are you|am i talking to|is this|is there|is speaking|do i talk to)
        """,
    },
    "sampling": {
        "ask": """
        (default|defaults|standard|which|what) (sampling|sampler|sampling settings|samplers|sampler settings)( are used| are there| values| order|)
        """,
    },
    "cache_place": {
        "ask": """
        (compiled|machine) (kernels|code) (where|folder|place|kept where|deleted|delete)
        """,
    },
    "version": {
        "ask": """
        (version|release|which version|version number)( installed| here| is this| of localllm| please|)
        """,
    },
}
