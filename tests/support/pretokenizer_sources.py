"""The source of each pre-tokenizer: a Hugging Face repository with such a tokenizer.json.

llama.cpp's converter recognizes these tokenizers by their ids of a test text (convert_hf_to_gguf_update.py) and writes
the name; src/llama-vocab.cpp has a rule for each. "-": only that rule is known.
"""

_TEXT = """
default -
falcon tiiuae/falcon-7b
gpt-2 openai-community/gpt2
phi-2 microsoft/phi-2
mpt mosaicml/mpt-7b
olmo allenai/OLMo-1.7-7B-hf
jais core42/jais-13b
trillion trillionlabs/Trillion-7B-preview
granite-docling ibm-granite/granite-docling-258M
exaone4 LGAI-EXAONE/EXAONE-4.0-32B
gigachat ai-sage/GigaChat-20B-A3B-instruct
a.x-4.0 skt/A.X-4.0
mellum JetBrains/Mellum-4b-base
modern-bert answerdotai/ModernBERT-base
roberta-bpe sentence-transformers/stsb-roberta-base
jina-es -
jina-de -
jina-v1-en jinaai/jina-reranker-v1-tiny-en
jina-v2-es jinaai/jina-embeddings-v2-base-es
jina-v2-de jinaai/jina-embeddings-v2-base-de
jina-v2-code jinaai/jina-embeddings-v2-base-code
starcoder bigcode/starcoder2-3b
refact smallcloudai/Refact-1_6-base
command-r CohereForAI/c4ai-command-r-v01
smollm HuggingFaceTB/SmolLM-135M
codeshell WisdomShell/CodeShell-7B
exaone LGAI-EXAONE/EXAONE-3.0-7.8B-Instruct
minerva-7b sapienzanlp/Minerva-7B-base-v1.0
mellum2 JetBrains/Mellum2-12B-A2.5B-Base
chameleon facebook/chameleon-7b
llama3 meta-llama/Meta-Llama-3-8B
llama-v3 meta-llama/Meta-Llama-3-8B
llama-bpe meta-llama/Meta-Llama-3-8B
falcon3 tiiuae/Falcon3-7B-Base
falcon-h1 tiiuae/Falcon-H1-0.5B-Base
pixtral mistral-community/pixtral-12b
midm-2.0 K-intelligence/Midm-2.0-Base-Instruct
lfm2 LiquidAI/LFM2-Tokenizer
jina-v5-nano jinaai/jina-embeddings-v5-text-nano
dbrx databricks/dbrx-base
smaug-bpe abacusai/Smaug-Llama-3-70B-Instruct
glm4 THUDM/glm-4-9b-hf
chatglm-bpe THUDM/glm-4-9b-chat
jais-2 inceptionai/Jais-2-8B-Chat
minicpm5 openbmb/MiniCPM5-1B
qwen2 Qwen/Qwen1.5-7B
deepseek-r1-qwen deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B
kormo KORMo-Team/KORMo-tokenizer
f2llmv2 codefuse-ai/F2LLM-v2-4B
megrez Infinigence/Megrez-3B-Instruct
stablelm2 stabilityai/stablelm-2-zephyr-1_6b
hunyuan tencent/Hunyuan-A13B-Instruct
solar-open upstage/Solar-Open-100B
grok-2 alvarobartt/grok-2-tokenizer
qwen35 Qwen/Qwen3.5-9B-Instruct
laguna -
ufakzeka -
seed-coder ByteDance-Seed/Seed-Coder-8B-Base
bailingmoe inclusionAI/Ling-lite
bailingmoe2 inclusionAI/Ling-mini-base-2.0
llada-moe -
exaone-moe LGAI-EXAONE/K-EXAONE-236B-A23B
gpt-4o Xenova/gpt-4o
llama4 meta-llama/Llama-4-Scout-17B-16E-Instruct
kanana2 kakaocorp/kanana-2-30b-a3b-instruct-2601
talkie lewtun/talkie-1930-13b-it-hf
minimax-m2 MiniMaxAI/MiniMax-M2
granite-embed-multi-97m ibm-granite/granite-embedding-97m-multilingual-r2
tiny_aya CohereLabs/tiny-aya-base
cohere2moe CohereLabs/North-Mini-Code-1.0
tekken mistralai/Mistral-Nemo-Base-2407
youtu tencent/Youtu-LLM-2B
kimi-k2 moonshotai/Kimi-K2-Base
deepseek-llm deepseek-ai/deepseek-llm-7b-base
deepseek-coder deepseek-ai/deepseek-coder-6.7b-base
deepseek-v3 deepseek-ai/DeepSeek-V3
hunyuan-dense tencent/Hunyuan-4B-Instruct
hy_v4 -
joyai-llm jdopensource/JoyAI-LLM-Flash
spark2_5 -
afmoe arcee-ai/Trinity-Tokenizer
bloom bigscience/bloom
poro-chat LumiOpen/Poro-34B-chat
gpt3-finnish TurkuNLP/gpt3-finnish-small
viking LumiOpen/Viking-7B
superbpe UW/OLMo2-8B-SuperBPE-t180k
gemma4 -
granite-embed-multi-311m ibm-granite/granite-embedding-311m-multilingual-r2
sarvam-moe sarvamai/sarvam-30b
"""

SOURCES: dict[str, str] = {name: source for name, source in (line.split() for line in _TEXT.split("\n") if line)}
