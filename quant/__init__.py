"""Encode weights to GGUF's block formats, by GPTQ or alone, and choose formats by llama.cpp's recipes."""
