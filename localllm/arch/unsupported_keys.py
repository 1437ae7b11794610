"""Settings that would change the result, in a file of a family that does not read them.

Refused, unless neutral.

A family's `read` notes what it has asked for (Fields.asked). What GGUF names besides is passed over only where it says
nothing, or where llama.cpp passes it over in files that people have.
"""

from localllm.arch.metadata import Fields
from localllm.files.gguf.metadata_reader import show

ONE = 0.0, 1.0  # 0 stands for a scale that a model has not
# By name, the values with which a setting changes nothing.
NEUTRAL = {
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.indexer.top_k": (0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_scale": (0.0,),
    "attention.scale": ONE,
    "attention.output_scale": ONE,
    "attention.value_scale": ONE,
    "embedding_length_per_layer_input": (0,),
    "embedding_scale": ONE,
    "expert_weights_scale": ONE,
    "expert_group_scale": ONE,
    "expert_group_count": (0, 1),
    "experts_per_group": (0, 1),
    "hyper_connection.count": (0, 1),
    "logit_scale": ONE,
    "residual_scale": ONE,
    "ssm.dt_b_c_rms": (False,),
}
# Families whose files have a setting that llama.cpp does not read.
PASSED_OVER = {
    "phi3": ("attention.sliding_window",),
    "gemma4": ("attention.scale",),  # 1, and not by the length of a head
}


def require_asked(fields: Fields) -> None:
    """Raise ModelError for a setting that counts and that the family has not asked for."""
    asked, window = fields.asked.union(PASSED_OVER.get(fields.arch, ())), "attention.sliding_window"
    for name, neutral in NEUTRAL.items():
        if name not in asked and fields.raw(name, neutral[0]) not in neutral:
            raise refusal(fields, name)
    if window not in asked and 0 < fields.count(window, 0) < fields.count("context_length"):
        raise refusal(fields, window)


def refusal(fields: Fields, name: str) -> Exception:
    """Return that a family does not know a setting."""
    return fields.unsupported(f"{fields.key(name)} is {show(fields.raw(name))}, which {fields.arch} models do not have")
