#!/usr/bin/env python3
"""Record what transformers and llama.cpp's converter make of tiny checkpoints, in tests/goldens/checkpoints.json.

    PYTHON scripts/record/record_checkpoints.py LLAMA_CPP [NAME...]

PYTHON has torch, transformers and safetensors (recorded: 2.13, 5.23), LLAMA_CPP is a folder with its sources. Without
names: every model of CONFIGS that is not there yet. Weights are those of tests/support/checkpoint.py, by the tensors'
names.
"""

import argparse
import importlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any
from zlib import crc32

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
TEXT = [(i * 37) % 250 + 3 for i in range(100)]  # as of tests/unit/convert/test_convert.py
GENERAL = ("general.architecture", "general.size_label", "general.file_type")
SMALL = {
    "vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 2,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_hidden_layers": 3, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
GROUPS = {"n_group": 4, "topk_group": 2, "n_routed_experts": 8, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
NOAUX = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
OF_GRANITE4 = {
    "layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3, "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "position_embedding_type": "nope",
    "shared_intermediate_size": 48, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
    "attention_multiplier": 0.2, "logits_scaling": 1.5, "tie_word_embeddings": True,
}  # fmt: skip
OF_FALCON_H1 = {
    "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
    "mamba_norm_before_gate": False, "embedding_multiplier": 1.5, "lm_head_multiplier": 0.7, "key_multiplier": 0.6,
    "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8, "ssm_multipliers": [0.9, 1.1, 0.7, 1.2, 0.8], "mlp_multipliers": [1.1, 0.9],
    "head_dim": 16,
}  # fmt: skip
# Models that see: the encoder is as small as can be.
QWEN_SEES = {"depth": 1, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN3_SEES = {"depth": 1, "num_heads": 2, "hidden_size": 32, "intermediate_size": 48, "patch_size": 14,
              "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}  # fmt: skip
GLM_SEES = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "patch_size": 14, "image_size": 56,
            "out_hidden_size": 64}  # fmt: skip
OF_CLIP = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
           "num_attention_heads": 2, "image_size": 56, "patch_size": 14, "projection_dim": 32}  # fmt: skip
OF_QWEN_VL = {**SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}}
# Those of which every fourth layer sees all tokens, and heads of which the beginning is rotated.
NARROW = {"rms_norm_eps": 1e-6}  # which norms of narrow rows have in transformers, whatever config.json says
WINDOWED = {"num_hidden_layers": 4, "sliding_window": 16, "head_dim": 16,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"]}  # fmt: skip
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
OF_GEMMA4 = {
    "num_hidden_layers": 4, "vocab_size": 268, "head_dim": 16, "global_head_dim": 32, "sliding_window": 16,
    "tie_word_embeddings": True, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
OF_NEMOTRON_H = {
    "head_dim": 16, "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
    "use_mamba_kernels": False,
}  # fmt: skip
OF_FALCON = {"activation": "gelu_pytorch_tanh", "max_position_embeddings": 2048}
OF_QWEN_NEXT = {
    **EXPERTS, "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "shared_expert_intermediate_size": 48, "num_experts": 4, "norm_topk_prob": True,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], **HALF,
}  # fmt: skip
OF_QWEN4 = {
    **OF_QWEN_NEXT, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 32,
    "output_gate_type": "sigmoid", "hc_count": 3, "hc_lowrank": 20, "indexer_n_heads": 5, "indexer_kv_heads": 1,
    "indexer_head_dim": 24, "indexer_budget": 20, "indexer_compress_ratio": 4,
    "rope_parameters": {**HALF["rope_parameters"], "mrope_section": [3, 3, 2]},
}  # fmt: skip
OF_T5 = {
    "d_model": 64, "d_ff": 96, "d_kv": 12, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 16,
    "decoder_start_token_id": 1,
}  # fmt: skip
# By name: the class of transformers' model, and what its config has besides SMALL.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ernie4_5": ("Ernie4_5ForCausalLM", {"head_dim": 24}),
    "seed_oss": ("SeedOssForCausalLM", {"head_dim": 24, "attention_bias": True}),
    "arcee": ("ArceeForCausalLM", {}),
    "dots1": ("Dots1ForCausalLM", {**EXPERTS, **GROUPS, "n_group": 1, "topk_group": 1, "head_dim": 16,
                                   "norm_topk_prob": True, **NOAUX}),
    "glm4_moe": ("Glm4MoeForCausalLM", {**EXPERTS, **GROUPS, "head_dim": 16, "attention_bias": True}),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", {**OF_GRANITE4, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitehybrid_dense": ("GraniteMoeHybridForCausalLM", {**OF_GRANITE4, "num_local_experts": 0,
                                                            "shared_intermediate_size": 96, "num_experts_per_tok": 0,
                                                            "layer_types": ["mamba", "mamba", "attention"]}),
    "jamba": ("JambaForCausalLM", {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2,
                                   "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4,
                                   "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 6,
                                   "use_mamba_kernels": False}),
    "lfm2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3,
                                 "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.1, "norm_eps": 1e-4,
                                 "tie_word_embeddings": True}),
    "lfm2_as_said": ("Lfm2ForCausalLM", {"layer_types": ["full_attention", "conv"], "conv_L_cache": 4,
                                         "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 24,
                                            "rotary_dim": 16, "use_qk_norm": True, "use_routing_bias": True,
                                            "scoring_func": "sigmoid", "num_mtp_modules": 0}),
    "deepseek32": ("DeepseekV32ForCausalLM", {
        **EXPERTS, **GROUPS, **NOAUX, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 40,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "index_n_heads": 16, "index_head_dim": 32,
        "index_topk": 24, "norm_topk_prob": True, "num_nextn_predict_layers": 0,
    }),
    "mamba2": ("Mamba2ForCausalLM", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2,
                                     "intermediate_size": 128}),
    "falcon_h1": ("FalconH1ForCausalLM", {**OF_FALCON_H1, "mamba_rms_norm": True}),
    "falcon_h1_plain": ("FalconH1ForCausalLM", {**OF_FALCON_H1, "mamba_rms_norm": False, "head_dim": 24}),
    "qwen2vl": ("Qwen2VLForConditionalGeneration", {
        "text_config": OF_QWEN_VL, "vision_config": {**QWEN_SEES, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    }),
    "qwen25vl": ("Qwen2_5_VLForConditionalGeneration", {
        "text_config": OF_QWEN_VL, "tie_word_embeddings": True,
        "vision_config": {**QWEN_SEES, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64,
                          "fullatt_block_indexes": [0], "window_size": 112},
    }),
    "smolvlm": ("SmolVLMForConditionalGeneration", {
        "text_config": {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        "scale_factor": 2, "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 56, "patch_size": 14},
    }),
    "t5": ("T5ForConditionalGeneration", {**OF_T5, "feed_forward_proj": "relu", "tie_word_embeddings": True}),
    "flan_t5": ("T5ForConditionalGeneration", {**OF_T5, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 1}),
    "mt5": ("MT5ForConditionalGeneration", {**OF_T5, "feed_forward_proj": "gated-gelu"}),
    "phi": ("PhiForCausalLM", {**HALF, "intermediate_size": 256, "num_key_value_heads": 4}),
    "gptneox": ("GPTNeoXForCausalLM", {**HALF, "hidden_act": "gelu_fast", "rotary_pct": 0.5}),
    "gptneox_serial": ("GPTNeoXForCausalLM", {**HALF, "hidden_act": "gelu_fast", "rotary_pct": 0.5,
                                              "use_parallel_residual": False}),
    "falcon": ("FalconForCausalLM", {**OF_FALCON, "num_kv_heads": 1, "multi_query": True, "tie_word_embeddings": True}),
    "falcon_new": ("FalconForCausalLM", {**OF_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "cohere": ("CohereForCausalLM", {"logit_scale": 0.3, "tie_word_embeddings": True}),
    "cohere_norms": ("CohereForCausalLM", {"logit_scale": 0.3, "tie_word_embeddings": True, "use_qk_norm": True}),
    "cohere2": ("Cohere2ForCausalLM", {**WINDOWED, "logit_scale": 0.3, "rotary_pct": 1.0,
                                       "tie_word_embeddings": True}),
    "olmo": ("OlmoForCausalLM", {"clip_qkv": 0.7}),
    "stablelm": ("StableLmForCausalLM", {**HALF, "use_qkv_bias": True}),
    "stablelm_norms": ("StableLmForCausalLM", {**HALF, "qk_layernorm": True, "use_parallel_residual": True}),
    "nemotron": ("NemotronForCausalLM", {**HALF, "head_dim": 16}),
    "exaone4": ("Exaone4ForCausalLM", WINDOWED),
    "exaone4_plain": ("Exaone4ForCausalLM", {"sliding_window": None, "head_dim": 16,
                                              "layer_types": ["full_attention"] * 2}),
    "glm4": ("Glm4ForCausalLM", {**HALF, "head_dim": 16, "attention_bias": True}),
    "glm": ("GlmForCausalLM", {**HALF, "head_dim": 16, "attention_bias": True, "rms_norm_eps": 1e-5,
                               "seq_length": 256}),
    "bloom": ("BloomForCausalLM", {"n_layer": 2, "n_head": 4, "seq_length": 256, "tie_word_embeddings": True}),
    "mpt": ("MptForCausalLM", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256,
                               "tie_word_embeddings": True, "architectures": ["MPTForCausalLM"]}),
    "apertus": ("ApertusForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "falcon_mamba": ("FalconMambaForCausalLM", {"state_size": 8, "intermediate_size": 128, "time_step_rank": 6,
                                                    "mixer_rms_eps": 1e-5}),
    "hunyuan_dense": ("HunYuanDenseV1ForCausalLM", {"head_dim": 24}),
    "hunyuan_moe": ("HunYuanMoEV1ForCausalLM", {
        "head_dim": 16, "num_experts": 4, "moe_topk": [2, 2], "moe_intermediate_size": [96, 96],
        "num_shared_expert": [1, 1],
    }),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {
        "num_hidden_layers": 3, "intermediate_size": 128, "moe_intermediate_size": 32, "moe_k": 2, "moe_num_experts": 4,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 2,
    }),
    "lfm2_moe": ("Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3,
                                        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                        "num_dense_layers": 1, "tie_word_embeddings": True}),
    "afmoe": ("AfmoeForCausalLM", {**WINDOWED, "num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1,
                                   "moe_intermediate_size": 32, "num_shared_experts": 1, "route_scale": 1.5,
                                   "route_norm": True, "mup_enabled": True, "score_func": "sigmoid"}),
    "dbrx": ("DbrxForCausalLM", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "attn_config": {
        "clip_qkv": 0.7, "kv_n_heads": 2, "rope_theta": 10000.0}, "ffn_config": {
        "hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {
        **NARROW,
        **EXPERTS, **GROUPS, **NOAUX, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "q_lora_rank": 32,
        "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "norm_topk_prob": True,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    }),
    "qwen3_next": ("Qwen3NextForCausalLM", OF_QWEN_NEXT),
    "qwen35": ("Qwen3_5ForCausalLM", {
        **{key: value for key, value in OF_QWEN_NEXT.items() if not re.search("expert|moe", key)}, "rope_parameters": {
            **HALF["rope_parameters"], "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    }),
    "qwen35_moe": ("Qwen3_5MoeForCausalLM", {**OF_QWEN_NEXT, "rope_parameters": {
        **HALF["rope_parameters"], "mrope_section": [2, 1, 1], "mrope_interleaved": True}}),
    "qwen4_exp": ("Qwen4ExpForCausalLM", {
        **OF_QWEN4, "ple_layer_ids": [1], "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 12, "split_ngram_parts": 4, "ple_conv_kernel_size": 3,
        "eos_token_id": 40}),
    "qwen4_exp_sees": ("Qwen4ExpForConditionalGeneration", {
        "vision_config": QWEN3_SEES, "text_config": {**SMALL, **OF_QWEN4, "indexer_compress_ratio": 5}}),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", {"text_config": {**SMALL, "head_dim": 24, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 4, 4], "mrope_interleaved": True}},
        "vision_config": QWEN3_SEES}),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", {
        "text_config": {**SMALL, "head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2,
                        "moe_intermediate_size": 48, "norm_topk_prob": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 4, 4], "mrope_interleaved": True}},
        "vision_config": QWEN3_SEES}),
    "gemma3n": ("Gemma3nForCausalLM", {
        "num_hidden_layers": 5, "head_dim": 16, "sliding_window": 16, "vocab_size": 268, "intermediate_size": [96] * 5,
        "vocab_size_per_layer_input": 268, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2,
        "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 5, "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention",
                        "full_attention"],
    }),
    "solar_open": ("SolarOpenForCausalLM", {
        **GROUPS, **NOAUX, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "head_dim": 24, "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0},
    }),
    "jais2": ("Jais2ForCausalLM", {"head_dim": 24}),
    "hy_v3": ("HYV3ForCausalLM", {
        **EXPERTS, "head_dim": 24, "num_experts": 4, "num_shared_experts": 2, "router_scaling_factor": 2.5,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    }),
    "granitemoe_shared": ("GraniteMoeSharedForCausalLM", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 1.5,
    }),
    "exaone_moe": ("ExaoneMoeForCausalLM", {
        **WINDOWED, "routed_scaling_factor": 2.5, "moe_intermediate_size": 32, "num_experts": 4,
        "num_experts_per_tok": 2, "num_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "scoring_func": "sigmoid", "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    }),
    "llava": ("LlavaForConditionalGeneration", {
        "text_config": {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        "vision_config": OF_CLIP}),
    "llava_qwen": ("LlavaForConditionalGeneration", {
        "text_config": {**SMALL, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        "vision_config": OF_CLIP}),
    "lfm2_vl": ("Lfm2VlForConditionalGeneration", {
        "text_config": {**SMALL, "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"],
                        "layer_types": ["full_attention", "conv"], "block_auto_adjust_ff_dim": False},
        "vision_config": {"model_type": "siglip2_vision_model", "hidden_size": 32, "intermediate_size": 48,
                          "num_hidden_layers": 1, "num_attention_heads": 2, "num_patches": 16, "patch_size": 14}}),
    "gemma4": ("Gemma4ForCausalLM", {**OF_GEMMA4, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2,
                                     "vocab_size_per_layer_input": 268, "use_double_wide_mlp": True,
                                     "final_logit_softcapping": 30.0}),
    "gemma4_large": ("Gemma4ForCausalLM", {**OF_GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
                                           "num_global_key_value_heads": 1, "num_kv_shared_layers": 0}),
    "gemma4_experts": ("Gemma4ForCausalLM", {
        **OF_GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 32,
    }),
    "minimax_m3": ("MiniMaxM3SparseForConditionalGeneration", {
        "vision_config": {**OF_CLIP, "model_type": "minimax_m3_vl_vision"}, "text_config": {
            **SMALL, "num_hidden_layers": 3, "head_dim": 16, "rotary_dim": 8, "num_local_experts": 4,
            "num_experts_per_tok": 2, "intermediate_size": 32, "dense_intermediate_size": 96,
            "shared_intermediate_size": 32, "routed_scaling_factor": 2.0, "moe_layer_freq": [0, 1, 1],
            "n_shared_experts": 1, "scoring_func": "sigmoid", "sparse_attention_config": {
                "sparse_num_index_heads": 2, "sparse_index_dim": 16, "sparse_block_size": 8, "sparse_topk_blocks": 4,
                "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1]},
            "rope_parameters": {**HALF["rope_parameters"], "rope_theta": 5e6}},
    }),
    "glm5_next": ("Glm5NextForConditionalGeneration", {
        "vision_config": {**OF_CLIP, "model_type": "glm5_next_vision"}, "text_config": {
            **SMALL, **NARROW, "num_hidden_layers": 4, "num_key_value_heads": 4, "moe_intermediate_size": 32,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "q_lora_rank": 32,
            "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 0, "v_head_dim": 20, "index_topk": 24,
            "index_kpool": 4, "index_head_dim": 32, "index_n_heads": 4, "mla_use_nope": True, "swiglu_limit": 2.0,
            "layer_types": ["linear_attention", *["indexed_attention"] * 2, "linear_attention"], "hc_mult": 2,
            "hc_sinkhorn_iters": 5,
            "indexer_types": ["full", "full", "shared", "full"], "scoring_func": "sigmoid",
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5, "linear_attn_config": {
                "head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0}},
    }),
    "muse_glimmer": ("MuseGlimmerForConditionalGeneration", {
        "vision_config": {**OF_CLIP, "model_type": "muse_glimmer_vision"}, "text_config": {**SMALL, **WINDOWED},
    }),
    "llama4": ("Llama4ForCausalLM", {
        "num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 32, "intermediate_size_mlp": 96,
        "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "moe_layers": [1, 3],
        "use_qk_norm": True,
    }),
    "bamba": ("BambaForCausalLM", {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 8,
                                   "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
                                   "rope_parameters": {**HALF["rope_parameters"], "partial_rotary_factor": 1.0}}),
    "nemotron_h": ("NemotronHForCausalLM", {
        "hybrid_override_pattern": "M-*M", "num_hidden_layers": 4, **OF_NEMOTRON_H,
    }),
    "nemotron_h_moe": ("NemotronHForCausalLM", {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], **OF_NEMOTRON_H,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 48,
    }),
    "umt5": ("UMT5ForConditionalGeneration", {**OF_T5, "feed_forward_proj": "gated-gelu"}),
    "mellum": ("MellumForCausalLM", {
        **WINDOWED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e4},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 5e4}},
    }),
    "laguna": ("LagunaForCausalLM", {
        **WINDOWED, "layer_types": ["full_attention", *["sliding_attention"] * 3], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "gating": "per-head",
        "shared_expert_intermediate_size": 48, "num_attention_heads_per_layer": [2, 4, 4, 4],
        "moe_routed_scaling_factor": 2.5, "moe_router_logit_softcapping": 0.0, "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    }),
    "cohere2_moe": ("Cohere2MoeForCausalLM", {
        **WINDOWED, "logit_scale": 0.3, "tie_word_embeddings": True, "num_experts": 4, "num_experts_per_tok": 2,
        "num_shared_experts": 1, "expert_selection_fn": "sigmoid", "norm_topk_prob": True, "rms_norm_eps": None,
        "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 80,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    }),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256,
                                              "tie_word_embeddings": True}),
    "granite_swa": ("GraniteSWAForCausalLM", {
        "num_hidden_layers": 4, "sliding_window": 16, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
        "attention_multiplier": 0.2, "logits_scaling": 1.5, "tie_word_embeddings": True,
    }),
    "granitemoe_swa": ("GraniteMoeSWAForCausalLM", {
        "num_hidden_layers": 4, "sliding_window": 16, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
        "attention_multiplier": 0.2, "logits_scaling": 1.5, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    }),
    "hrm_text": ("HrmTextForCausalLM", {
        "num_layers_per_stack": 2, "num_hidden_layers": 12, "num_key_value_heads": None, "H_cycles": 2, "L_cycles": 2,
        "head_dim": 24, "embedding_scale": 3.0, "prefix_lm": False,
    }),
    "kimi_linear": ("KimiLinearForCausalLM", {
        **NARROW,
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "linear_attention", "full_attention",
                                                "linear_attention"],
        "num_key_value_heads": 4, "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20,
        "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32, "num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5, "linear_head_dim": 16, "linear_num_heads": 4, "linear_conv_kernel_dim": 4,
        "moe_router_activation_func": "sigmoid", "model_max_length": 256, "linear_attn_config": {
            "full_attn_layers": [3], "kda_layers": [1, 2, 4], "head_dim": 16, "num_heads": 4,
            "short_conv_kernel_size": 4},
    }),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", {
        **WINDOWED, **NOAUX, "head_dim": 24, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "attention_value_scale": 0.7, "mlp_layer_types": ["dense", *["sparse"] * 3],
        "moe_layer_freq": [0, 1, 1, 1], "hybrid_layer_pattern": [1, 1, 1, 0], "rope_theta": 5e6, "swa_rope_theta": 1e4,
        "partial_rotary_factor": 0.334, "layernorm_epsilon": 1e-5, "swa_head_dim": 24, "swa_v_head_dim": 16,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }),
    "minicpm3": ("MiniCPM3ForCausalLM", {
        **NARROW,
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "tie_word_embeddings": True,
    }),
    "youtu": ("YoutuForCausalLM", {
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 20, "tie_word_embeddings": True,
    }),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", {
        **NARROW,
        **EXPERTS, **GROUPS, **NOAUX, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "q_lora_rank": 32,
        "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "index_n_heads": 16,
        "index_head_dim": 32, "index_topk": 24, "norm_topk_prob": True, "num_nextn_predict_layers": 0,
        "num_hidden_layers": 4, "indexer_types": ["full", "full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    }),
    "hy_v4": ("HYV4ForCausalLM", {
        **NARROW,
        **EXPERTS, **GROUPS, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "q_lora_rank": 32,
        "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "index_n_heads": 16,
        "index_head_dim": 32, "index_topk": 24, "norm_topk_prob": True, "num_hidden_layers": 4,
        "indexer_types": ["full", "shared", "full", "shared"], "hc_mult": 2, "swiglu_limit": 1.0,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    }),
    "janus": ("JanusForConditionalGeneration", {
        "text_config": {**SMALL, "model_type": "llama"},
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
                          "patch_size": 16, "projection_dim": 64, "mlp_ratio": 1.5},
        "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "latent_channels": 32,
                      "num_embeddings": 64, "projection_dim": 64, "image_token_embed_dim": 64},
    }),
    "glm4v": ("Glm4vForConditionalGeneration", {
        "text_config": {**SMALL, "attention_bias": True, "rope_parameters": {
            **HALF["rope_parameters"], "mrope_section": [1, 1, 2]}},
        "vision_config": {**GLM_SEES, "num_heads": 2},
    }),
    "glm_ocr": ("GlmOcrForConditionalGeneration", {
        "text_config": {**SMALL, "head_dim": 24, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 5, 5],
            "partial_rotary_factor": 1.0}},
        "vision_config": {**GLM_SEES, "num_heads": 2},
    }),
    "glm4v_moe": ("Glm4vMoeForConditionalGeneration", {
        "text_config": {**SMALL, **EXPERTS, **GROUPS, "head_dim": 16, "attention_bias": True, "norm_topk_prob": True,
                        "rope_parameters": {**HALF["rope_parameters"], "mrope_section": [1, 1, 2]}},
        "vision_config": {**GLM_SEES, "num_heads": 2},
    }),
    "paddleocr": ("PaddleOCRVLForConditionalGeneration", {
        "text_config": {**SMALL, "head_dim": 24, "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e5, "mrope_section": [4, 4, 4]}},
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
                          "image_size": 56, "patch_size": 14},
    }),
    "hunyuan_vl": ("HunYuanVLForConditionalGeneration", {
        "text_config": {**SMALL, "head_dim": 24, "rope_parameters": {
            "rope_type": "xdrope", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0, "xdrope_section": [3, 3, 3, 3]}},
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
                          "out_hidden_size": 64, "text_hidden_size": 64, "patch_size": 16, "max_image_size": 64},
    }),
    "phimoe": ("PhimoeForCausalLM", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "lm_head_bias": True, "attention_bias": True,
        "architectures": ["PhiMoEForCausalLM"], "router_jitter_noise": 0.0, "original_max_position_embeddings": 256,
    }),
}  # fmt: skip
# Whose config.json the converter should read as it is: transformers hides a key of one, and adds some to the other.
WITH_MTP = (
    "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "MiMoV2FlashForCausalLM",
)  # fmt: skip
AS_IT_IS = (
    "GPTNeoXForCausalLM", "NemotronHForCausalLM", "MiMoV2FlashForCausalLM", "MiniMaxM3SparseForConditionalGeneration",
    "Glm5NextForConditionalGeneration", "Qwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration",
)  # fmt: skip
# Of which GGUF's readers compute something else: another GELU; norms without mean; neighbours are rotated, not halves;
# the fourth position of a text stands still.
UNLIKE = ("mpt", "phimoe", "hy_v4", "hunyuan_vl")
# What does not belong to a model's computation.
NOISE = (
    "dtype", "transformers_version", "use_cache", "initializer_range", "attention_dropout", "hidden_dropout",
    "resid_pdrop", "embd_pdrop", "classifier_dropout", "router_aux_loss_coef", "output_router_logits",
)  # fmt: skip
OF_TEXT = 60  # tokens of TEXT that an encoder reads
# The same of models that make vectors and scores: what is recorded are the mean of the last rows, or the scores.
OF_ENCODERS = {
    "vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256, "type_vocab_size": 2, "pad_token_id": 1,
}  # fmt: skip
MODERN = {"num_hidden_layers": 4, "local_attention": 16, "global_attn_every_n_layers": 3}
# The converter cuts off rows that no token has.
GEMMA = {"vocab_size": 268, "num_hidden_layers": 7, "num_key_value_heads": 1, "head_dim": 16,
         "query_pre_attn_scalar": 16, "sliding_window": 16, "use_bidirectional_attention": True}  # fmt: skip
LABELS = {"num_labels": 1}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "bert-rank": ("BertForSequenceClassification", LABELS),
    "xlm-roberta": ("XLMRobertaModel", {"max_position_embeddings": 258}),
    "xlm-roberta-rank": ("XLMRobertaForSequenceClassification", {"max_position_embeddings": 258, **LABELS}),
    "modern-bert": ("ModernBertModel", MODERN),
    "modern-bert-rank": ("ModernBertForSequenceClassification", {**MODERN, **LABELS, "classifier_pooling": "mean"}),
    "nomic-bert": ("NomicBertModel", {"max_position_embeddings": 2048}),
    "gemma-embedding": ("Gemma3TextModel", GEMMA),
    "distilbert": ("DistilBertModel", {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4}),
    "eurobert": ("EuroBertModel", {**SMALL, "pad_token_id": 1, "mask_token_id": 3, "classifier_pooling": "mean"}),
    "t5encoder": ("T5EncoderModel", {**OF_T5, "feed_forward_proj": "gated-gelu"}),
    "qwen3-rank": ("Qwen3ForSequenceClassification", {**SMALL, "tie_word_embeddings": True, "pad_token_id": 1,
                                                      **LABELS}),
}  # fmt: skip

# Those that transformers does not have, and one as its publishers call things: config.json, and shapes.
LAYER = {"attention.self.query": "64 64", "attention.self.key": "64 64", "attention.self.value": "64 64",
         "attention.output.dense": "64 64", "attention.output.LayerNorm": "64"}  # fmt: skip
WORDS = {"embeddings.word_embeddings.weight": "272 64", "embeddings.token_type_embeddings.weight": "2 64"}


def with_biases(shapes: dict[str, str], without: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the shapes of weights and of their biases, which have a number per row."""
    found = {f"{name}.weight": shape for name, shape in shapes.items()}
    return found | {f"{name}.bias": shape.split()[0] for name, shape in shapes.items() if name not in without}


def in_layers(prefix: str, shapes: dict[str, str]) -> dict[str, str]:
    return {f"{prefix}.0-1.{name}": shape for name, shape in shapes.items()}


JINA = {
    **OF_ENCODERS, "architectures": ["JinaBertForMaskedLM"], "model_type": "bert", "hidden_act": "gelu",
    "position_embedding_type": "alibi", "feed_forward_type": "geglu", "layer_norm_eps": 1e-12,
}  # fmt: skip
NOMIC = {
    "architectures": ["NomicBertModel"], "model_type": "nomic", "vocab_size": 272, "n_embd": 64, "n_inner": 96,
    "n_layer": 2, "n_head": 4, "n_positions": 8192, "max_trained_positions": 2048, "activation_function": "swiglu",
    "causal": False, "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "prenorm": False,
    "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_base": 1000, "rotary_emb_scale_base": None,
    "layer_norm_epsilon": 1e-12,
    "type_vocab_size": 2,
}  # fmt: skip
MOE = {
    **NOMIC, "n_positions": 2048, "activation_function": "gelu", "qkv_proj_bias": True, "mlp_fc1_bias": True,
    "mlp_fc2_bias": True, "rotary_emb_base": 10000, "moe_every_n_layers": 2, "moe_top_k": 2, "num_experts": 4,
}  # fmt: skip
ATTENTION = {"attn.Wqkv": "192 64", "attn.out_proj": "64 64"}
BEHIND = {"norm1": "64", "norm2": "64"}
# Decoders of the same kind, by name: what their config.json has besides SMALL, and their tensors besides the usual.
KEYS = "64 64", "32 64", "32 64", "64 64"
QKV = {f"self_attn.{name}_proj.weight": shape for name, shape in zip("qkvo", KEYS, strict=True)}
FEEDS = {"mlp.gate_proj.weight": "96 64", "mlp.up_proj.weight": "96 64", "mlp.down_proj.weight": "64 96"}
NORMS = {"input_layernorm.weight": "64", "post_attention_layernorm.weight": "64"}
LLAMA = {**QKV, **FEEDS, **NORMS}
BIASES = {f"self_attn.{name}_proj.bias": shape[:2] for name, shape in zip("qkvo", KEYS, strict=True)}
LATENT = {"self_attn.q_proj.weight": "96 64", "self_attn.kv_a_proj_with_mqa.weight": "48 64", "self_attn.o_proj.weight":
          "64 80", "self_attn.kv_a_layernorm.weight": "40", "self_attn.kv_b_proj.weight": "144 40"}  # fmt: skip
OF_EXPERTS = {"mlp.experts.0-3.gate_proj.weight": "32 64", "mlp.experts.0-3.up_proj.weight": "32 64",
              "mlp.experts.0-3.down_proj.weight": "64 32", "mlp.gate.weight": "4 64"}  # fmt: skip
SHARED = {"mlp.shared_experts.gate_proj.weight": "64 64", "mlp.shared_experts.up_proj.weight": "64 64",
          "mlp.shared_experts.down_proj.weight": "64 64"}  # fmt: skip
EARLY = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "norm_topk_prob": False}
LING = {"attention.query_key_value.weight": "128 64", "attention.dense.weight": "64 64", **NORMS}
LIGHTNING = {"self_attn.qkv_proj.weight": "192 64", "self_attn.output_gate.weight": "64 64",
             "self_attn.norm.weight": "64", "self_attn.out_proj.weight": "64 64"}  # fmt: skip
MIXTRAL = {"block_sparse_moe.experts.0-3.w1.weight": "32 64", "block_sparse_moe.experts.0-3.w2.weight": "64 32",
           "block_sparse_moe.experts.0-3.w3.weight": "32 64", "block_sparse_moe.gate.weight": "4 64"}  # fmt: skip


def layer(number: int | str, shapes: dict[str, str], prefix: str = "model.layers") -> dict[str, str]:
    return {f"{prefix}.{number}.{name}": shape for name, shape in shapes.items()}


OF_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "layer_norm_epsilon": 1e-5}
DECODERS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "bitnet": ({"architectures": ["BitnetForCausalLM"], "hidden_act": "silu", "tie_word_embeddings": True},
               layer("0-1", {
        **LLAMA, "self_attn.inner_attn_ln.weight": "64", "mlp.ffn_layernorm.weight": "96"})),
    "internlm2": ({"architectures": ["InternLM2ForCausalLM"], "bias": False, "rope_theta": 1e6}, {
        **layer("0-1", {"attention.wqkv.weight": "128 64", "attention.wo.weight": "64 64",
                        "attention_norm.weight": "64", "ffn_norm.weight": "64", "feed_forward.w1.weight": "96 64",
                        "feed_forward.w2.weight": "64 96", "feed_forward.w3.weight": "96 64"})}),
    "internlm3": ({"architectures": ["InternLM3ForCausalLM"], "qkv_bias": False, "head_dim": 16, "rope_theta": 5e7,
                   "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}, layer("0-1", LLAMA)),
    "baichuan": ({"architectures": ["BaichuanForCausalLM"], "num_key_value_heads": None}, layer("0-1", {
        "self_attn.W_pack.weight": "192 64", "self_attn.o_proj.weight": "64 64", **FEEDS, **NORMS})),
    "xverse": ({"architectures": ["XverseForCausalLM"], "num_key_value_heads": 4}, layer("0-1", {
        **LLAMA, "self_attn.k_proj.weight": "64 64", "self_attn.v_proj.weight": "64 64"})),
    "orion": ({"architectures": ["OrionForCausalLM"]}, {
        "model.norm.bias": "64", **layer("0-1", {
            **LLAMA, "input_layernorm.bias": "64", "post_attention_layernorm.bias": "64"})}),
    "exaone": ({"architectures": ["ExaoneForCausalLM"], "num_layers": 2, "activation_function": "silu",
                "layer_norm_epsilon": 1e-5, "rope_theta": 1e6}, layer("0-1", {
        "attn.attention.q_proj.weight": "64 64", "attn.attention.k_proj.weight": "32 64",
        "attn.attention.v_proj.weight": "32 64", "attn.attention.out_proj.weight": "64 64", "ln_1.weight": "64",
        "ln_2.weight": "64", "mlp.c_fc_0.weight": "96 64", "mlp.c_fc_1.weight": "96 64", "mlp.c_proj.weight": "64 96",
    }, "transformer.h")),
    "minicpm": ({"architectures": ["MiniCPMForCausalLM"], "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32,
                 "rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 256,
                                  "long_factor": [1.0 + n / 8 for n in range(8)], "short_factor": [1.0] * 8}},
                layer("0-1", LLAMA)),
    "deepseek": ({"architectures": ["DeepseekForCausalLM"], **EARLY, "n_routed_experts": 4, "n_shared_experts": 2,
                  "scoring_func": "softmax"}, {
        **layer("0-1", {**QKV, **NORMS}), **layer(0, FEEDS), **layer(1, {**OF_EXPERTS, **SHARED})}),
    "bailingmoe": ({"architectures": ["BailingMoeForCausalLM"], **EARLY, "first_k_dense_replace": 0,
                    "num_experts": 4, "num_shared_experts": 2,
                    "norm_topk_prob": True, "norm_head": False, "head_dim": 16, "use_bias": False,
                    "use_qkv_bias": False}, {
        **layer("0-1", {**LING, **OF_EXPERTS, **SHARED})}),
    "bailingmoe2": ({"architectures": ["BailingMoeV2ForCausalLM"], **EARLY, "num_experts": 4, "num_shared_experts": 1,
                     "norm_topk_prob": True, "head_dim": 16, "use_qk_norm": True, "routed_scaling_factor": 2.5,
                     "n_group": 2, "topk_group": 1, "score_function": "sigmoid", "partial_rotary_factor": 0.5,
                     "num_nextn_predict_layers": 0, "moe_shared_expert_intermediate_size": 64}, {
        **layer("0-1", {**LING, "attention.query_layernorm.weight": "16", "attention.key_layernorm.weight": "16"}),
        **layer(0, FEEDS), **layer(1, {**OF_EXPERTS, **SHARED, "mlp.gate.expert_bias": "4"})}),
    "minimax01": ({"architectures": ["MiniMaxText01ForCausalLM"], "num_hidden_layers": 8, "num_local_experts": 4,
                   "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16,
                   "attn_type_list": [0] * 7 + [1], "postnorm": True, "shared_intermediate_size": 0,
                   "rotary_dim": 8, "partial_rotary_factor": 0.5, "rope_theta": 1e6, **{
                       f"layernorm_{kind}_{name}": value for kind in ("full_attention", "linear_attention", "mlp")
                       for name, value in (("alpha", 3.5), ("beta", 1.0))}}, {
        **layer("0-6", LIGHTNING), **layer(7, QKV), **layer("0-7", {**NORMS, **MIXTRAL})}),
    "plm": ({"architectures": ["PLMForCausalLM"], "num_key_value_heads": 4, "hidden_act": "relu2", "kv_lora_rank": 40,
             "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}, layer("0-1", {
        **LATENT, **NORMS, "mlp.up_proj.weight": "96 64", "mlp.down_proj.weight": "64 96"})),
    "pangu": ({"architectures": ["PanguEmbeddedForCausalLM"], "bias": True}, layer("0-1", {**LLAMA, **BIASES})),
    "maincoder": ({"architectures": ["MaincoderForCausalLM"], "head_dim": 16}, layer("0-1", {
        **LLAMA, "self_attn.q_norm.weight": "16", "self_attn.k_norm.weight": "16"})),
    "smallthinker": ({
        "architectures": ["SmallThinkerForCausalLM"], "num_hidden_layers": 5, "moe_num_primary_experts": 4, "head_dim":
        16, "moe_num_active_primary_experts": 2, "moe_ffn_hidden_size": 32, "moe_primary_router_apply_softmax": False,
        "norm_topk_prob": True, "sliding_window_layout": [0, 1, 1, 1, 0], "sliding_window_size": 4096,
        "rope_layout": [0, 1, 1, 1, 0], "moe_layer_layout": [1] * 5, "moe_enable_early_router": True}, layer("0-4", {
        **QKV, **NORMS, "block_sparse_moe.primary_router.weight": "4 64",
        "block_sparse_moe.experts.0-3.gate.weight": "32 64", "block_sparse_moe.experts.0-3.up.weight": "32 64",
        "block_sparse_moe.experts.0-3.down.weight": "64 32"})),
    "arctic": ({"architectures": ["ArcticForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
                "intermediate_size": 32, "use_residual": True, "parallel_attn_mlp_res": True}, layer("0-1", {
        **QKV, **NORMS, **MIXTRAL, "residual_layernorm.weight": "64", "residual_mlp.w1.weight": "64 64",
        "residual_mlp.w2.weight": "64 64", "residual_mlp.w3.weight": "64 64"})),
    "codeshell": ({**OF_GPT2, "architectures": ["CodeShellForCausalLM"], "num_query_groups": 2,
                   "activation_function": "gelu_pytorch_tanh", "position_embedding_type": "rope",
                   "group_query_attention": True}, {
        "model.norm.bias": "64", **with_biases({f"transformer.h.0-1.{name}": shape for name, shape in (
            ("ln_1", "64"), ("ln_2", "64"), ("attn.c_attn", "128 64"), ("attn.c_proj", "64 64"),
            ("mlp.c_fc", "256 64"), ("mlp.c_proj", "64 256"))})}),
    "refact": ({**OF_GPT2, "architectures": ["GPTRefactForCausalLM"], "multi_query": True}, layer("0-1", {
        "ln_1.weight": "64", "ln_2.weight": "64", "attn.q.weight": "64 64", "attn.kv.weight": "32 64",
        "attn.c_proj.weight": "64 64", "mlp.gate_up_proj.weight": "512 64", "mlp.c_proj.weight": "64 256",
    }, "transformer.h")),
    "dream": ({"architectures": ["DreamModel"], "rope_theta": 1e6, "mask_token_id": 7}, layer("0-1", {
        **LLAMA, **{key: size for key, size in BIASES.items() if "o_proj" not in key}})),
    "llada": ({"architectures": ["LLaDAModelLM"], "d_model": 64, "n_heads": 4, "n_kv_heads": 4, "n_layers": 2,
               "num_key_value_heads": 4,
               "mlp_hidden_size": 96, "max_sequence_length": 256, "weight_tying": False, "mask_token_id": 7,
               "block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu"}, layer("0-1", {
        "attn_norm.weight": "64", "ff_norm.weight": "64", "q_proj.weight": "64 64", "k_proj.weight": "64 64",
        "v_proj.weight": "64 64", "attn_out.weight": "64 64", "ff_proj.weight": "96 64", "up_proj.weight": "96 64",
        "ff_out.weight": "64 96"}, "model.transformer.blocks")),
    "llada_moe": ({"architectures": ["LLaDAMoEModelLM"], "num_experts": 4, "num_experts_per_tok": 2,
                   "expert_intermediate_size": 32, "head_dim": 16, "qk_layernorm": True, "norm_topk_prob": False},
                  layer("0-1", {**QKV, **NORMS, **OF_EXPERTS, "self_attn.q_norm.weight": "16",
                                "self_attn.k_norm.weight": "16"})),
    "nanbeige": ({"architectures": ["NanbeigeForCausalLM"], "num_loops": 2, "skip_loop_final_norm": True},
                 layer("0-1", LLAMA)),
}  # fmt: skip
# What the usual tensors are called there.
RENAMED = {
    "internlm2": {"model.embed_tokens": "model.tok_embeddings", "lm_head": "output"},
    "exaone": {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"},
    "codeshell": {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"},
    "refact": {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"},
    "llada": {
        "model.embed_tokens": "model.transformer.wte",
        "model.norm": "model.transformer.ln_f",
        "lm_head": "model.transformer.ff_out",
    },
    "bailingmoe": {"model.embed_tokens": "model.word_embeddings"},
    "bailingmoe2": {"model.embed_tokens": "model.word_embeddings"},
}
BY_HAND: dict[str, dict[str, Any]] = {
    "jina-bert": {"config": JINA, "shapes": {
        **WORDS, **with_biases({"embeddings.LayerNorm": "64"}),
        **in_layers("encoder.layer", with_biases(
            {**LAYER, "mlp.gated_layers": "192 64", "mlp.wo": "64 96", "mlp.layernorm": "64"}, ("mlp.gated_layers",))),
    }},
    "jina-bert-code": {"config": {**JINA, "auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling"}},
                       "shapes": {
        **WORDS, **with_biases({"embeddings.LayerNorm": "64"}),
        **in_layers("encoder.layer", with_biases(
            {**LAYER, "attention.self.layer_norm_q": "64", "attention.self.layer_norm_k": "64", "layer_norm_1": "64",
             "mlp.up_gated_layer": "192 64", "mlp.down_layer": "64 96", "layer_norm_2": "64"},
            ("mlp.up_gated_layer",))),
    }},
    **{name: {"config": {**SMALL, "rms_norm_eps": 1e-5, "model_type": name, **config}, "shapes": {
        "model.embed_tokens.weight": "272 64", "model.norm.weight": "64", **shapes,
        **({} if config.get("tie_word_embeddings") else {"lm_head.weight": "272 64"}),
    }} for name, (config, shapes) in DECODERS.items()},
    "nomic-bert-old": {"config": NOMIC, "like": "nomic-bert"},
    "nomic-bert-moe": {"config": MOE, "shapes": {
        **WORDS, **with_biases({"emb_ln": "64"}), **in_layers("encoder.layers", with_biases({**ATTENTION, **BEHIND})),
        **{name.replace("#", "0"): shape for name, shape in with_biases(
            {"encoder.layers.#.mlp.fc1": "96 64", "encoder.layers.#.mlp.fc2": "64 96"}).items()},
        "encoder.layers.1.mlp.router.layer.weight": "4 64", "encoder.layers.1.mlp.experts.bias": "64",
        "encoder.layers.1.mlp.experts.mlp.w1": "384 64", "encoder.layers.1.mlp.experts.mlp.w2": "384 64",
    }},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("names", nargs="*", choices=[[], *CONFIGS, *ENCODERS, *BY_HAND], metavar="NAME")
    options = parser.parse_args()
    path = ROOT / "tests" / "goldens" / "checkpoints.json"
    known = json.loads(path.read_text())
    sys.path[:0] = [str(options.sources), str(options.sources / "gguf-py")]
    for name in options.names or [name for name in (*CONFIGS, *ENCODERS, *BY_HAND) if name not in known]:
        with tempfile.TemporaryDirectory() as folder:
            make = by_hand if name in BY_HAND else recorded
            known[name] = make(name, Path(folder), options.sources)
        print(name, (known[name].get("logits") or known[name].get("rows", []))[:2], flush=True)
    path.write_text(written(known), encoding="utf-8")


def written(known: dict[str, Any]) -> str:
    """Return the file's text: a line for each part of a model."""
    models = []
    for name, model in known.items():
        parts = (f"  {json.dumps(part)}: {json.dumps(content)}" for part, content in model.items())
        models.append(f" {json.dumps(name)}: {{\n" + ",\n".join(parts) + "\n }")
    return "{\n" + ",\n".join(models) + "\n}\n"


def recorded(name: str, folder: Path, sources: Path) -> dict[str, Any]:
    """Record one model."""
    import numpy as np
    import torch
    import transformers
    from checkpoint import write_family
    from safetensors import safe_open

    kind, own = CONFIGS.get(name) or ENCODERS[name]
    made = getattr(transformers, kind)
    config = made.config_class(**{**(SMALL if name in CONFIGS else OF_ENCODERS), **own})
    made(config).save_pretrained(folder / "saved")
    with safe_open(folder / "saved" / "model.safetensors", "np") as file:
        shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    if name in ("qwen3_next", "qwen35"):  # whose publishers store a layer that guesses, which transformers leaves out
        shapes |= {
            key.replace("model.layers.1.", "mtp.layers.0."): s for key, s in shapes.items() if "layers.1." in key
        }
        shapes |= {f"mtp.{key}.weight": [64] for key in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
        shapes["mtp.fc.weight"] = [64, 128]
    if kind == "Qwen3VLMoeForConditionalGeneration":  # whose publishers store experts turned round
        shapes = {key: [shape[0], *shape[:0:-1]] if ".experts." in key else shape for key, shape in shapes.items()}
    if name == "kimi_linear":  # whose first network transformers stores as if it was of experts
        shapes = {re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", key): shape for key, shape in shapes.items()}
    if name == "hy_v4":  # some of whose names transformers turns round
        shapes = {re.sub(r"hc_pre\.(hc_head|hc_(?:attn|mlp)_layer)\.", r"\1.hc_pre.", k): s for k, s in shapes.items()}
        shapes = {key.replace("hc_head.hc_pre.", "hc_head."): shape for key, shape in shapes.items()}
        shapes = {re.sub(r"(mlp\..*)linear_gate", r"\1gate_proj", key): shape for key, shape in shapes.items()}
    content = json.loads((folder / "saved" / "config.json").read_text())
    content = {key: value for key, value in content.items() if key not in NOISE}
    # As publishers say it.
    said = (*NOAUX, "layer_types", "architectures")
    content |= {key: value for key, value in own.items() if key in said or key not in content}
    if name in ("minimax_m3", "glm5_next", "qwen4_exp_sees"):
        inner = content["text_config"]
        inner |= {key: value for key, value in own["text_config"].items() if key in said or key not in inner}
    if name == "nemotron_h":  # whose config.json speaks of experts as transformers saves it
        experts = re.compile("moe|expert|topk|n_group$|layers_block_type")
        content = {key: value for key, value in content.items() if not experts.search(key)}
    if name == "mimo_v2_flash":  # whose publishers say it otherwise
        del content["rope_parameters"]
    checkpoint = write_family(folder / "model", content, shapes)
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = made.from_pretrained(checkpoint, dtype=torch.float64, **kinds).eval()
    with torch.no_grad(), in_float64():
        read, answer = TEXT[:OF_TEXT], [content.get("decoder_start_token_id"), *TEXT[OF_TEXT:]]
        is_t5 = content.get("is_encoder_decoder", False)
        given = {"input_ids": read, "decoder_input_ids": answer} if is_t5 else {"input_ids": TEXT}
        output = model(**{key: torch.tensor([ids]) for key, ids in given.items()})
    if kind == "NomicBertModel":  # whose publishers' config.json the converter knows
        write_family(checkpoint, NOMIC, shapes)
    spans = {key: " ".join(map(str, shape)) for key, shape in shapes.items()}
    found = {"config": content, "shapes": together(spans)}
    # The converter wants a vocabulary with "yes" and "no" for the one, leaves a matrix of the other's head out, and
    # does not know what to do with the third's norms.
    if name not in ("qwen3-rank", "bert-rank", "stablelm_norms"):
        metadata, tensors = converted(checkpoint, folder / "model.gguf")
        found |= {"metadata": metadata, "tensors": tensors}
    if name in UNLIKE:
        return found
    if name in CONFIGS:
        logits = output.logits[0, -1].numpy().astype(np.float64)
        return {**found, "logits": [round(float(x), 7) for x in logits[:251:50]]}
    rows = output.logits[0] if "logits" in output else output.last_hidden_state[0].mean(dim=0)
    return {**found, "rows": [round(float(x), 6) for x in rows]}


@contextmanager
def in_float64() -> Iterator[None]:
    """Compute in float64 what models compute in float32 in any type.

    It is off by up to 3e-5 (the delta rule of Qwen 3.5).
    """
    import torch

    single, cast = torch.float32, torch.Tensor.float
    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.float32, torch.Tensor.float = single, cast  # type: ignore[method-assign]


def by_hand(name: str, folder: Path, sources: Path) -> dict[str, Any]:
    """Record only what llama.cpp's converter makes of a checkpoint."""
    from checkpoint import spelled_out, write_family

    found = BY_HAND[name]
    if "shapes" not in found:
        return found
    for old, new in RENAMED.get(name, {}).items():
        found["shapes"] = {key.replace(old, new): shape for key, shape in found["shapes"].items()}
    checkpoint = write_family(folder / "model", found["config"], spelled_out(found["shapes"]))
    metadata, tensors = converted(checkpoint, folder / "model.gguf")
    return {**found, "metadata": metadata, "tensors": tensors}


def together(shapes: dict[str, str]) -> dict[str, str]:
    """Merge names that differ by a number only into one: 0-3 for 0, 1, 2 and 3."""
    behind = (r"\.experts\.", r"\.norms\.", r"\.layers\.", r"\.h\.", r"\.blocks\.")
    for place in (rf"(?<={name})\d+(?=\.)" for name in behind):
        key = lambda item: (re.sub(place, "#", item[0]), item[1])  # noqa: E731, B023
        found: dict[str, str] = {}
        for (name, shape), group in groupby(sorted(shapes.items(), key=key), key):
            numbers = sorted(int(match[0]) for one, _ in group if (match := re.search(place, one)))
            for first, last in runs(numbers) if numbers else [(0, 0)]:
                found[name.replace("#", f"{first}-{last}" if last > first else f"{first}", 1)] = shape
        shapes = found
    return shapes


def runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Format sorted numbers as ranges."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def layer_of(name: str) -> int:
    """Of a tensor; -1 if it is of none."""
    return int(name.split(".")[1]) if name.startswith("blk.") else -1


def converted(checkpoint: Path, target: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Metadata and check sums of what llama.cpp's converter makes of it."""
    import gguf

    conversion = importlib.import_module("conversion")
    conversion.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    config = json.loads((checkpoint / "config.json").read_text())
    kind = (config.get("text_config", {}).get("architectures") or config["architectures"])[0]
    made = conversion.get_model_class(kind)
    made.set_vocab = conversion.TextModel.set_vocab
    if kind == "BaichuanForCausalLM":  # whose converter calls itself forever for all other tensors
        own_way, usual = made.modify_tensors, conversion.TextModel.modify_tensors
        made.modify_tensors = lambda self, data, name, bid: (own_way if "W_pack" in name else usual)(
            self, data, name, bid
        )
    made._get_suppress_tokens = lambda self: None  # by the vocabulary
    own = {"hparams": config} if kind in AS_IT_IS else {}
    guesses = b"mtp.fc.weight" in (checkpoint / "model.safetensors").read_bytes()
    if kind in WITH_MTP:
        made.no_mtp = not guesses
    if kind == "NomicBertModel":  # which is known by its publishers' config.json only
        made._is_tokenizer_xlmroberta = lambda self: False
    made(checkpoint, gguf.LlamaFileType.ALL_F32, target, **own).write()
    reader = gguf.GGUFReader(target)
    of_arch = f"{reader.fields['general.architecture'].contents()}."
    fields = {key: field.contents() for key, field in reader.fields.items()}
    metadata = {key: value for key, value in fields.items() if key in GENERAL or key.startswith(of_arch)}
    sums: dict[str, int] = {}
    for tensor in sorted(reader.tensors, key=lambda tensor: layer_of(tensor.name)):
        short = re.sub(r"^blk\.\d+\.", "blk.", tensor.name)
        shape = " ".join(map(str, reversed(tensor.shape.tolist())))
        known = crc32(f"{tensor.tensor_type.name} {shape}".encode(), sums.get(short, 0))
        sums[short] = crc32(tensor.data.tobytes(), known)
    for unlike in ("blk.ssm_a", "dec.output_norm.weight"):  # see tests/unit/convert/families/test_families.py
        sums.pop(unlike, None)
    return metadata, {short: f"{number:08x}" for short, number in sums.items()}


if __name__ == "__main__":
    main()
