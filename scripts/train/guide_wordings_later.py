# ruff: noqa: E501 (a pattern stands on one line)
"""Wordings that only the second round of training has, in the notation of guide_wordings.py: stories, haste, other words.

The first round learns the subjects, the second that everyday words around them change nothing.
"""

LATER: dict[str, dict[str, str]] = {
    "pull": {
        "ask": """
        (please |could you |can you |)(fetch|get|download|pull|grab) {modelname}( for me| from the web| onto this {disk}| now|)
        (syntax|usage|command|example|way|recipe) (for|to|of) (downloading|download|pulling|pull|fetching|fetch|getting|get) (a model|models|{modelname}|the {quant} of a model|a {quant} file|another quantization)
        (i|my son|my wife|our team|a friend|the boss) (would like|wants|want|needs|need|wishes) to (try|play with|test|have|use) {modelname}(, how do we get it|, where do i get it|. what do i type|, how to download it|)
        (the|a|only the|not the usual but the) {quant} (of|from|for) {modelname}( please| is what i want| would be better|, how do i pull that|)
        {modelname} (is|isnt|is not) (on|here on) (my|this) {disk} yet(, how do i get it|. how do i download it|)
        (internet|web|hub|hugging face) (to|->) (disk|my computer|my laptop)(, which command|)
        (how can|can) (a|one|any) (model|gguf) (be|get) (downloaded|fetched|pulled|brought here|obtained|installed)( from the web| from hugging face| by name|)
        (bring|get|have) (me |)(a model|{modelname}|some model) (from|off) (the internet|the web|the hub|hugging face)( please|)
        """,
    },
    "get_model": {
        "ask": """
        (what|which) (place|site|store|corner of the internet|source) (offers|has|hosts|keeps|provides|gives away) (models|gguf files|free models|ggufs|weights)( for this| that run here|)
        (i|we) (lack|miss|need|still need|am missing|look for) (a|some|any) (model|models|gguf|weights)(, where are they|, where to look|, from where|. where do people get them|)
        (no|without|zero) (model|models) (yet|here|so far|installed)(, where from|... where from|, where do i get one|. and now|)
        (is there|do you know) (a|some|any) (catalogue|catalog|collection|archive|library|shelf) (of|with|for) (ggufs|models|gguf stuff|free models|weights)( on the net| online| somewhere|)
        """,
    },
    "pull_resume": {
        "ask": """
        (i|somebody|my cat|my son) (closed|shut|dropped|unplugged|switched off) (the|my) (lid|laptop|computer|cable|router|machine) (while|when|during) (it was |i was |)(downloading|pulling|fetching|the download|the pull)( a model|)(, what now|, is it lost|, do i start over|, does it count|)
        (the|my) (train|bus|plane) (went into a tunnel|left the station|lost the network)(, | and )(the |my |)(pull|download|transfer) (stopped|broke off|died|failed|hangs)( what now|)
        (power cut|blackout|crash|reboot|timeout|connection reset|network error|broken pipe) (during|in|while|in the middle of) (a |the |)(download|pull|pulling|downloading)( a model|)(, what now|, start again|)
        (half|one third|most|3 gb|90 percent|some) of (the|a) (file|model|download) (is|was|came|arrived)(, then|, but then|. then) (it|the network|the download|pull) (stopped|broke|died|failed)(, is it lost|, what now|, do i begin again|)
        (are|is|were) (the|my) (first gigabytes|part that came|bytes so far|downloaded part|half file|partial file) (kept|lost|wasted|reused|used again|thrown away|still good)( when a pull breaks| after a broken download|)
        (does|will|can) (it|pull|the download) (remember|know|keep|notice) (where it was|what it has|how far it was|the part that is there)( after a crash| next time|)
        """,
    },
    "fit": {
        "ask": """
        (would|will|does|can|could) (my|our|this) (old |new |poor |little |)(notebook|laptop|computer|machine|server|desktop|workstation|macbook|thinkpad) (cope with|manage|handle|stand|carry|survive|run|be able to run|bear|take) (a|an|the|) ({size}|{size} model|{modelname}|big model|large model)
        (i|we) (have|got|own|am on|bought) (a laptop|a computer|a notebook|a server|a machine) with {gigs}(, which size|, what fits|, what can i run|, how big can a model be|, would {modelname} fit|, is {modelname} possible|. how do i know what fits|)
        (is|are) (4gb|8gb|16gb|32gb|64gb|8 gigs|16 gigs) (sufficient|enough|ok|plenty|too little|fine) (for|to run|to hold) ({modelname}|a {size} model|a {size})
        (i|we) (want|would like|need|wish) to (see|know|learn|find out) (the ram|the memory|how much memory|how much ram|what memory|how many gigabytes) (a {size} model|{modelname}|it|a model) (eats|needs|takes|wants|would take)( before i get it| before downloading| first| in advance|)
        (check|look|see|tell me|find out) (first|beforehand|in advance|before the download|before i wait for hours)(, |) (whether|if) (a model|it|{modelname}|a {size} model) (fits|runs|is too big|works on this laptop|can be handled)
        (what|which) (can|could|will) (my|this) (laptop|machine|computer|hardware) (run|handle|hold|manage)(, what is too big| at most| with {gigs}|)
        (do|would|will) i (have|need) (enough|more|sufficient) (memory|ram) (for|to run) (a {size}|a {size} model|{modelname}|such a model|it)
        """,
    },
    "list": {
        "ask": """
        (what|which ones|what models|what all|which) (have i|did i|do i|have we) (got|get|have|pull|download|collect|fetch)( downloaded| here| already| pulled|)( so far| by now| until now|)
        (my|the) (disk|drive|ssd) (fills up|is full|has no room|runs out of space|is nearly full)(, which models can go|, how do i remove one|, away with the old models|, how to delete models|. how do i drop a model|)
        (away|off|out) with (the|this|a|that) (model|old model|big model|{modelname})( from my disk|)
        (removing|deleting|erasing|uninstalling|dropping) (a |the |my |)(model|models|downloaded models|{modelname}|old models)( to free disk space| from disk| by command|)
        (names|models|what) (that |)(i can|can i|one can|could i) (use|type|give|put) (with|for|behind|after|to) (pull|localllm pull|run)
        (show|tell|print|give) (me |)(what|which models|everything that) (is here|lies here|is installed|i have downloaded|is on disk|is available|can be pulled)
        (inventory|stock|collection|shelf|overview) of (models|my models|the models here|downloaded models)
        """,
    },
    "map": {
        "ask": """
        (ten|twenty|fifty|one|two|five|three) (thousand|hundred|million) (product |customer |film |book |)(reviews|questions|tickets|emails|comments|tweets|abstracts|titles|sentences|records)(, tag each|, classify them|, rate each one|, one answer each|, how do i ask about all|, label them|, translate each|)( as positive or negative| with a model| please|)
        (run|put|send|apply|try|use) (a|one|my|the same) (prompt|question|instruction|template) (over|on|for|to|against) (all|every|each|the|all the) (lines|line|row|rows|record|records|entries|entry|reviews) (in|of) (a|my|the|this) (file|text file|jsonl|csv|list|table)
        (does|will|would|did) (the|a|my) (batch|map|batch job|run over the file|map run) (lose|keep|forget|remember|save) (its|the|all|my) (work|answers|results|progress|state)( when i press ctrl-c| when it is stopped| after a crash| if it dies| over night|)
        (how|in which way|in what form) (should|must|do|does) (the|my|a) (records|lines|input|batch input|file|questions|input file) (for map |of a batch |of map |)(look|be written|be laid out|look like|be formatted|be given)
        (i|we) (keep|have|stored|wrote|collected) (our|my|all|some) {records} (in|as) (a|one) (text file|file|spreadsheet|jsonl|csv|list)(, how do i get them all answered|, can they be answered at once|, please answer them all|. which command|)
        (answer|do|process|handle|solve|classify|translate) (them all|all of them|each of them|every one|every line|each line|line after line|one by one)( in a file| from my file| automatically| in bulk|)
        (bulk|mass|batch|overnight|offline) (answers|questions|processing|inference|run|classification|translation|job|work)( from a file| with localllm| how|)
        """,
    },
    "convert": {
        "ask": """
        (i|we) (cloned|downloaded|pulled|copied|fetched) (a|the|some) (repo|repository|folder|project|checkpoint) (from|off) (huggingface|hugging face|the hub|hf)( with safetensors inside| and it has safetensors| with shards and json files|)(, how do i run it|, what now|, how do i use it|)
        (make|build|get|want|need) (a|one) gguf (out of|from|for) (my own|my|our|a) (fine tune|finetune|training|trained model|checkpoint|transformers model|folder|weights)
        (is|are) (torch|pytorch|transformers|python packages|llama.cpp scripts|extra tools) (needed|required|necessary|used|a must) (for|to) (convert|converting|the conversion|safetensors)
        (a|the|my) (folder|directory|repo) (has|with|holds|contains) (safetensors|shards|model-00001-of-00004.safetensors|config.json|tokenizer.json|weights and a config)( in it| inside|)(, what now|, how do i run that|, make a gguf of it|)
        (weights|checkpoint|model|folder) (from|of|by) (hugging face|transformers|unsloth|axolotl|the hub) (into|to|as) (a |)(gguf|gguf file|single file)
        (my|our|the) (own|self made|home made|retrained|domain) (model|fine-tune|weights) (to|into|in|with) (gguf|localllm)
        """,
    },
    "quantize": {
        "ask": """
        (f16|bf16|fp16|f32|16 bit) (to|into|down to) (q4_k_m|q5_k_m|q6_k|q8_0|q4_0|four bits|8 bits|5 bits)( please| how| with which command|)
        (my|this|the) (14|16|30|7|60) (gb|gig|gigabyte) (gguf|file|model) (should|must|has to|needs to|ought to) (become|be|get|turn) (smaller|small|4 bit|lighter|half the size)
        (squeeze|press|get|cut|bring) (a|my|the|this) (big|fat|heavy|huge|f16|full) (model|gguf|file) (down|into less|to a quarter|to half|into 4 bits|into 5 gb|to q4)
        """,
    },
    "schema": {
        "ask": """
        (the |)(reply|answer|output|result) (must|should|has to|may only|shall) (be|have|say|contain|come as) (one of red, green, blue|one of {word}, {word} and {word}|{word} or {word}|one of three options|a list of names|a number from 1 to 5|yes or no|an object with {word} and {word}|a date|an email address|a valid json object|exactly one word)
        (one of|either|choose between|pick from|only) {word}(, | or ){word}( or {word}|)(, nothing else| as the answer| is allowed| may come out)
        (use|enforce|apply|follow|obey|stick to|respect) (a|my|the|this) (pydantic model|schema|json schema|grammar|regex|regular expression|pattern|format|structure)
        (can|could|will|does) (it|the model|the answer|localllm) (stick to|follow|obey|keep to|be bound to|be held to|respect|be made to follow) (a|my|the) (regex|schema|grammar|pattern|format|list of words|json schema)
        (i|we|my database|our pipeline) (need|want|needs|wants|must get|expects) (clean|valid|strict|guaranteed|proper|parseable) (json|objects|records|data|labels)( with certain fields| every time| from the model|)
        (label|labels|category|categories|class|choice) (only|from a list|out of four|from a fixed set|and nothing else|out of these)( please| as the answer|)
        (say|print|answer|return|output) (nothing but|only|just|exactly|solely) (a label|one label|yes or no|a digit|json|a date|the number|one of my words|a color)
        """,
    },
    "sessions": {
        "ask": """
        (how to|can i|i want to|please|let me) (save|keep|store|preserve) (this|the|our|my) (conversation|chat|talk) (to|and|so that i can|in order to) (continue|go on|finish|read it|resume|carry on) {later}
        (show|list|print|display|see) (my |the |all |)(stored|saved|kept|old|recorded|past) (dialogs|dialogues|chats|talks|conversations|sessions)
        (resume|continue|reopen|go on with|take up|get back to) (the|our|my|that) (conversation|chat|session) (we had|i had|from|of) (last week|this morning|last night|on friday|before lunch)
        (what|whats|anything) (happens to|becomes of|is left of|remains of) (my|the|this|our) (chat|conversation|talk) (when|if|after) i (close|quit|leave|exit|shut down|reboot|log out|switch off)( the terminal| the window| the computer| it|)
        (pick up|take up|go on|continue) (where|from where) (we|i) (left|stopped|were|ended|had stopped)( yesterday| last time| on friday| before|)
        (chats|conversations|talks|sessions) (on|to|in) (disk|file|files|a file)
        (drop|delete|remove|erase) (a|one|that|the) (stored|saved|kept|recorded) (chat|talk|conversation|dialog|session)( please| again| for good|)
        (give|call) (my|the|this) (chat|conversation) a name( to find it again| and keep it| for later|)
        """,
    },
    "platforms": {
        "ask": """
        (win11|win10|windows11|osx|mac os|mac|macbook|ubuntu|fedora|debian|linux|raspberry pi|rpi|pi 5|pi 4|arm64|apple silicon|m1|m2|m3|m4|termux|android|wsl2|windows on arm)( support| ok| possible| too| works| supported| version| user here| owner here|)
        (would|will|does|could|can) (my|our|the|this) (old |new |m1 |m2 |m3 |m4 |)(mac|macbook|macbook air|mac mini|imac|windows pc|windows laptop|linux box|raspberry pi|pi|arm board|surface|chromebook) (do|work|run it|be ok|be fine|suffice|be enough|run localllm|start it|do the job)
        (i|we|my girlfriend|my father|everybody here) (have|has|only have|work with|use|uses|got) (a|an|only a|just a|) (mac|macbook|windows|windows pc|linux|imac|raspberry pi|surface|apple computer|ubuntu laptop)(, is that a problem|, can i still use it|, does that work|, any chance|, what about me|. will it run|)
        (runs|run|works|work|starts|start|installs) (on|under|with) (ubuntu|debian|windows|a mac|macos|linux|arm|a raspberry pi|apple silicon|windows 11|wsl)
        """,
    },
    "config": {
        "ask": """
        (default|standard|usual|permanent|my) (threads|temperature|context|model|options|system prompt|values|settings|flags)( for all commands| for every run| set once| in a file| for one model| without typing|)
        (stop|tired of|sick of|no more|avoid|fed up with) (typing|writing|repeating|entering) (the same flags|all these options|the model name|the same options)( each time| every time| always| again|)
        (is there|do you know|where is|where lies) (a|the|my) (settings file|config file|configuration|dot file|place for settings|place for defaults)( somewhere| in my home| for localllm|)
        (settings|configuration|config|preferences|defaults) (file|place|location|path|where|how)
        (per|for each|for a certain|for one) (model|command) (defaults|settings|options|temperature|context)
        """,
    },
    "elsewhere": {
        "ask": """
        (ollama|llama.cpp|llama-cli|llama cpp) (user|person|habits|fan|convert|refugee|script)( here|)(, what do i type|, what do i type instead|, where do i begin|. what is different|, what changes|)
        (what|which command|which) (is instead of|stands for|corresponds to|takes the place of|does the job of|matches) (ollama run|llama-cli|ollama pull|ollama|llama.cpp|llama-run|ollama chat)( here| in localllm|)
        (does|do|will|would|can) (a|my|an old|the|my old) (llama-cli|llama.cpp|ollama) (command line|commands|command|line|script|scripts|options|call) (run|work|go|function|do|pass)( unchanged| here| as they are| too| as is|)
        (are|is) (llama.cpps|ollamas|the llama.cpp|the usual|the same) (options|flags|names|commands) (known|valid|the same|used|understood|taken|kept)( here|)
        (-ngl|-fa|-b|--mlock|-c and -n|-hf|-m)( from llama.cpp| of llama.cpp| as in llama.cpp| like in llama-cli) (work|works|known|valid|ok|too)( here| too|)
        """,
    },
    "exit_codes": {
        "ask": """
        (overview|table|list|summary|meanings) of (statuses|exit codes|codes|exit statuses|return values|error numbers|the codes)( of localllm| please|)
        """,
    },
    "undo": {
        "ask": """
        (oops|damn|sorry|wait|no|argh)(,| ) (wrong question|that was wrong|i did not mean that|wrong file|i meant something else|forget my last question|not that)(, take it back|, undo|, can i change it|, let me edit that|)
        (edit|change|correct|fix|reword|alter) (what i just|my question i just|the thing i just|the text i) (asked|wrote|typed|sent|said)
        """,
    },
    "retry": {
        "ask": """
        (give|show|write|tell|offer)( me|) (a|an|some) (different|other|new|second|better) (reply|answer|version|response|try)
        (bad|poor|weak|boring|wrong) answer(, again please|, another one|, try once more|, one more try)
        """,
    },
    "branch": {
        "ask": """
        (fork|split|copy|duplicate|clone|branch) (this|the|our|my) (conversation|chat|talk|discussion)( here| at this point| please|)
        """,
    },
    "read_file": {
        "ask": """
        (attach|add|send|give|show|load|include) (notes.txt|letter.txt|report.md|a file|my file|this document|a text) (to|in|into|with) (the|this|my|a) (chat|conversation|next question)
        """,
    },
    "thinking": {
        "ask": """
        (switch off|turn off|disable|no|without|stop|less|shorten) (the |)(reasoning|thinking|thoughts|thought)( for qwen3| of the model| for deepseek| please|)
        """,
    },
    "device": {
        "ask": """
        (offload|put|move|push|send) (10|20|30|all|some|half the|the) (layers|layer|weights) (to|onto|on) (my|the|a) (nvidia card|gpu|card|graphics card|vram)
        """,
    },
    "kv_type": {
        "ask": """
        (8 bit|4 bit|q8_0|q4_0|quantized|smaller|compressed) (kv cache|cache|kv|keys and values)
        """,
    },
    "flag_n": {
        "ask": """
        (answers|replies|texts|stories|sentences|it) (end|ends|stop|stops|break off|breaks off|finish|finishes) (abruptly|suddenly|too soon|in mid sentence|halfway|without a point|out of nowhere)
        (keep|hold|make|have) (replies|answers|it|the text|the output) (under|below|within|to|at) (50|60|80|100|200|forty) (tokens|words)
        (not more than|at most|up to|below|max) (50|60|100|a hundred|thirty) (tokens|words)( each| per answer| please|)
        """,
    },
    "flag_seed": {
        "ask": """
        (identical|equal|same|unchanged|constant|stable) (output|answer|text|result|words) (on|at|in|with|for) (each|every) (invocation|run|call|start|time|try)
        (no|without|less|remove) (randomness|surprises|variation|chance|luck)( in the answers| please|)
        """,
    },
    "flag_f": {
        "ask": """
        (summarise|summarize|translate|explain|proofread|shorten|digest) (report.txt|notes.txt|letter.txt|my essay|readme.md|this file|the log|a long article|my thesis)( for me| please|)
        (have|let) (it|the model) (read|look at|summarize|check|see|go through) (a|my|the) (file|letter|document|report|text file|log|essay)( and tell me what is in it| and sum it up| for errors|)
        """,
    },
    "flag_sys": {
        "ask": """
        (let|make|have) (it|the model|the ai|my model) (play|be|act as|talk like|speak like|sound like|pretend to be|behave as) (a|an) (old |friendly |strict |wise |)(teacher|professor|king|cowboy|detective|grandmother|{word})( all the time| always|)
        (every|each|all) (answer|answers|reply|replies) (in|should be in|must be in|as) (french|rhymes|german|one sentence|capital letters|a polite tone|the style of {word})
        """,
    },
    "privacy": {
        "ask": """
        (is|are|was) (my|the|our|any) (text|input|prompt|question|chat|words|letters|texts) (uploaded|sent|transferred|shown to others|seen by somebody|read by a company|sent out|shared|visible to others|leaving my house)
        (does|do) (a|the|any|some) (word|byte|bit|letter|part) (of it |of my text |)(leave|go out of|get out of) (my|this) (computer|machine|laptop|house|network)
        """,
    },
    "gpu": {
        "ask": """
        (no|without|not even a|i lack a) (graphics card|gpu|nvidia card|video card|dedicated graphics)( in here| in this machine| at all| in my laptop|)(, trouble|, problem|, does it matter|, is that bad|, ok|, and now|)
        (only|just) (a|an|my) (cpu|processor|intel processor|laptop cpu|office pc)(, enough|, ok|, does that do|, is that enough|)
        """,
    },
    "internet": {
        "ask": """
        (works|usable|runs|can i use it|does it work|functional) (on a plane|in a tunnel|without wifi|in the forest|during a blackout of the network|at the cottage|offline|at sea)
        """,
    },
    "first_start": {
        "ask": """
        (initial|first|very first) (launch|start|run|call|startup) (was|is|took|felt|seemed) (super slow|slow|forever|very slow|endless|quite slow|ages|long|slower)( why|, why|)
        """,
    },
    "which_quant": {
        "ask": """
        (best|right|good|safest|usual) (quant|quantization|type|file|version) (for|if i am|when one is) (beginners|a beginner|newcomers|a laptop|most people|daily use|unsure|starters)
        """,
    },
    "flag_json": {
        "ask": """
        (output|something|a form|an answer|results) (my|that my|which a|that a) (jq|script|parser|program|tool|other program) (can|could) (digest|parse|read|eat|understand|work with|process)
        """,
    },
    "bench": {
        "ask": """
        (benchmark|time|clock|speed test|test) (my|this|the) (machine|computer|model|laptop|cpu)( please| now| with localllm|)
        """,
    },
    "about": {
        "ask": """
        (elevator|short|quick|one minute) (pitch|intro|summary|introduction) (for|of|to) (localllm|this|the program)
        """,
    },
    "flag_temp": {
        "ask": """
        (more|less) (imaginative|creative|inventive|random|varied|sober|wild|daring|fanciful) (output|answers|text|stories|writing|replies)( please| how|)
        """,
    },
    "flag_c": {
        "ask": """
        (window|context|room|space) (of|for) (4k|8k|16k|32k|8192|16000|many) tokens( please| how|)
        """,
    },
    "inspect": {
        "ask": """
        (see|show|read|print|look at) (the |)(metadata|header|details|tensors|insides) of (a|my|this) (file|gguf|model)
        """,
    },
    "perplexity": {
        "ask": """
        (measure|test|see|check|find) (the |)(quality loss|loss|loss of quality|damage|difference) (after|by|from|of) (quantizing|quantization|shrinking|compression)
        """,
    },
    "leave": {
        "ask": """
        (enough|done|finished|that was it|im off|i am off)(, how do i close this|, how to quit|, let me out|, close the chat|)
        """,
    },
}
