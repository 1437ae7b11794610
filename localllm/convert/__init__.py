"""Read Hugging Face checkpoints as if they were GGUF files, for quantizing.

A folder of config.json, *.safetensors and tokenizer files is read with the tensor names, the order of rows and the
metadata of llama.cpp's converter. `open_folder` combines these modules: records (declarations of a family's
checkpoints), safetensors_files (read by rows), tensor_mapping (each tensor under its GGUF name, computed by
transforms), and vocabulary. `open_projector` does the same for the projector of a vision model, and `open_clip` for
CLIP's two encoders.
"""

from localllm.convert.clip import is_clip_folder, open_clip
from localllm.convert.folder import Checkpoint, open_folder
from localllm.convert.projector_folder import open_projector

__all__ = ["Checkpoint", "is_clip_folder", "open_clip", "open_folder", "open_projector"]
