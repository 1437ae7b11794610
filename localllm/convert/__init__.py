"""Hugging Face checkpoints as models to quantize: a folder of config.json, *.safetensors and tokenizer files, read as
if it were a GGUF file, with the names, the order of rows and the metadata that llama.cpp's converter would give it.

`open_folder` puts the parts together: families (which architectures, what they say in config.json and what their layers
hold), weights (safetensors files, read by rows), arrangement (each tensor in its place, made
by the functions of tensors), and vocabulary (with tokens, sentencepiece and pretokenizer_name). `open_projector` does
the same for the projector of a model that sees, whose parts are in projectors/.
"""

from localllm.convert.folder import Checkpoint, open_folder
from localllm.convert.pair_folder import is_pair_folder, open_pair
from localllm.convert.projector_folder import open_projector

__all__ = ["Checkpoint", "is_pair_folder", "open_folder", "open_pair", "open_projector"]
