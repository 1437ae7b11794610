"""Read Hugging Face checkpoints as if they were GGUF files, for quantizing.

A folder of config.json, *.safetensors and tokenizer files is read with the tensor names, the order of rows and the
metadata of llama.cpp's converter. `open_folder` combines the parts: families (config.json and the layers of each
architecture), weights (safetensors files, read by rows), arrangement (each tensor in its place, transformed by
the functions of tensors), and vocabulary (with tokens, sentencepiece and pretokenizer_name). `open_projector` does
the same for the projector of a vision model, whose parts are in projectors/.
"""

from localllm.convert.folder import Checkpoint, open_folder
from localllm.convert.pair_folder import is_pair_folder, open_pair
from localllm.convert.projector_folder import open_projector

__all__ = ["Checkpoint", "is_pair_folder", "open_folder", "open_pair", "open_projector"]
