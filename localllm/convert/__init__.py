"""Hugging Face checkpoints as models to quantize: a folder of config.json, *.safetensors and tokenizer files, read as
if it were a GGUF file, with the names, the order of rows and the metadata that llama.cpp's converter would give it.

`open_folder` puts the parts together: families (which architectures, and how their weights are named and shaped),
hyperparameters, weights (safetensors files, read by rows), and vocabulary (with sentencepiece and pretokenizer_name).
"""

from localllm.convert.folder import Checkpoint, open_folder

__all__ = ["Checkpoint", "open_folder"]
