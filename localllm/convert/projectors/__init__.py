"""Convert the vision projectors of checkpoints, by their model class.

To add one, write a function that reads config.json and declares the projector's tensors, and enter it in PROJECTORS.
"""

from collections.abc import Callable

from localllm.convert.config import CheckpointConfig
from localllm.convert.projectors import internvl, llava, qwen, siglip
from localllm.convert.projectors.parts import ProjectorDeclaration, VisionConfig
from localllm.files.gguf.header import printable

PROJECTORS: dict[str, Callable[[VisionConfig], ProjectorDeclaration]] = {
    "Gemma3ForConditionalGeneration": siglip.read_gemma3,
    "Idefics3ForConditionalGeneration": siglip.read_idefics3,
    "InternVLForConditionalGeneration": internvl.read_internvl,
    "Lfm2VlForConditionalGeneration": siglip.read_lfm2vl,
    "LlavaForConditionalGeneration": llava.read_llava,
    "LlavaNextForConditionalGeneration": llava.read_llava_next,
    "Mistral3ForConditionalGeneration": llava.read_mistral3,
    "Qwen2VLForConditionalGeneration": qwen.read_qwen2vl,
    "Qwen2_5_VLForConditionalGeneration": qwen.read_qwen25vl,
    "Qwen3VLForConditionalGeneration": qwen.read_qwen3vl,
    "Qwen3VLMoeForConditionalGeneration": qwen.read_qwen3vl,
    "Qwen3_5ForConditionalGeneration": qwen.read_qwen3vl,
    "Qwen3_5MoeForConditionalGeneration": qwen.read_qwen3vl,
    "SmolVLMForConditionalGeneration": siglip.read_idefics3,
}


def find_projector(config: CheckpointConfig) -> Callable[[VisionConfig], ProjectorDeclaration]:
    """Return the function that reads a checkpoint's projector. Raises ModelError if its class is not supported."""
    if config.get("vision_config") is None:
        raise config.make_error("vision_config is missing: the model has no vision encoder")
    if config.architecture not in PROJECTORS:
        supported = ", ".join(PROJECTORS)
        raise config.make_error(f"the projector of {printable(config.architecture)} is not supported ({supported} are)")
    return PROJECTORS[config.architecture]
