"""Read Hugging Face checkpoints as if they were GGUF files, for quantizing.

`open_folder` reads config.json, *.safetensors and the tokenizer files of a folder, and returns tensors and metadata as
llama.cpp's converter would write them: the same names, row order and keys. Its modules: records (declarations of each
family's checkpoints), safetensors_files (rows on demand), tensor_mapping (GGUF names) with transforms (computed
tensors), and vocabulary. `open_projector` does the same for the projector of a vision model, `open_clip` for CLIP's two
encoders.
"""

from localllm.convert.clip import is_clip_folder, open_clip
from localllm.convert.folder import Checkpoint, open_folder
from localllm.convert.projector_folder import open_projector

__all__ = ["Checkpoint", "is_clip_folder", "open_clip", "open_folder", "open_projector"]
