"""What a tiny composite has around its language part: a vision tower with sizes of its own."""

from typing import Any

HIDDEN = 96
"""Of the language part, which towers project into."""

_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 52,
    "num_heads": 3,
    "patch_size": 4,
    "image_size": 16,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
}
_VIT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 16,
    "patch_size": 4,
}
_IDS = {
    "image_token_id": 390,
    "video_token_id": 391,
    "vision_start_token_id": 392,
    "vision_end_token_id": 393,
}
_SAM = {
    "hidden_size": 36,
    "output_channels": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 64,
    "mlp_dim": 44,
    "window_size": 2,
    "global_attn_indexes": [1],
    "downsample_channels": [28, 48],
}
_ENCODER = _VIT | {"num_key_value_heads": 3, "vocab_size": 7, "max_position_embeddings": 64}

AROUND: dict[str, dict[str, Any]] = {
    "aria": {
        "vision_config": {"model_type": "idefics3_vision"} | _VIT,
        "projector_patch_to_query_dict": {16: 4},
        "image_token_index": 390,
    },
    "deepseek_ocr2": {
        "vision_config": {"sam_config": _SAM, "encoder_config": _ENCODER},
        "image_token_id": 390,
    },
    "gemma4": {
        "vision_config": _VIT
        | {"num_key_value_heads": 3, "head_dim": 16, "position_embedding_size": 64},
        "image_token_id": 390,
        "video_token_id": 391,
        "audio_token_id": 389,
    },
    "glm4v_moe": {"vision_config": _TOWER} | _IDS,
    "glm5_next": {"vision_config": _TOWER | {"projection_intermediate_size": 60}} | _IDS,
    "hy_v4_vl": {
        "vision_config": _VIT | {"out_hidden_size": HIDDEN},
        "image_token_id": 390,
        "video_token_id": 391,
    },
    "inkling2": {
        "vision_config": _VIT | {"text_hidden_size": HIDDEN, "projection_hidden_dim": 44},
        "image_token_id": 390,
    },
    "inkling_mm_model": {
        "vision_config": _VIT | {"patch_size": 40, "text_hidden_size": HIDDEN},
        "audio_config": {"n_mel_bins": 5, "mel_vocab_size": 7, "text_hidden_size": HIDDEN},
        "image_token_id": 390,
        "audio_token_id": 389,
        "image_bos_token_id": 388,
        "audio_bos_token_id": 387,
    },
    "internvl": {
        "vision_config": _VIT | {"image_size": [16, 16], "patch_size": [4, 4]},
        "image_token_id": 390,
        "image_seq_length": 4,
    },
    "kimi_k25": {
        "vision_config": _VIT | {"pos_emb_height": 8, "pos_emb_width": 8},
        "projection_hidden_size": 48,
    }
    | _IDS,
    "minimax_m3_vl": {
        "vision_config": _VIT | {"model_type": "minimax_m3_vl_vision"},
        "projector_hidden_size": 64,
        "image_token_index": 390,
        "video_token_index": 391,
    },
    "mistral_large4": {
        "vision_config": {"model_type": "pixtral"} | _VIT,
        "image_token_index": 390,
    },
    "mistral3": {
        "vision_config": {"model_type": "pixtral"} | _VIT,
        "image_token_index": 390,
    },
    "nemotron_h_omni": {
        "vision_config": {"model_type": "radio", "video_temporal_patch_size": 2} | _VIT,
        "projector_hidden_size": 64,
        "vision_hidden_size": 48,
        "image_token_id": 390,
        "video_token_id": 391,
        "audio_token_id": 389,
    },
    "qwen3_5_moe": {"vision_config": _TOWER} | _IDS,
    "qwen3_omni_moe_thinker": {
        "vision_config": _TOWER | {"deepstack_visual_indexes": [0]},
        "audio_config": {
            "num_mel_bins": 8,
            "encoder_layers": 1,
            "encoder_attention_heads": 3,
            "encoder_ffn_dim": 44,
            "d_model": 48,
            "output_dim": HIDDEN,
            "downsample_hidden_size": 20,
        },
        "audio_token_id": 389,
        "audio_start_token_id": 388,
    }
    | _IDS,
    "qwen3_vl_moe": {"vision_config": _TOWER | {"deepstack_visual_indexes": [0]}} | _IDS,
    "unlimited_ocr": {
        "vision_config": {"sam_config": _SAM, "encoder_config": _VIT},
        "image_token_id": 390,
    },
    "qwen4_exp": {"vision_config": _TOWER} | _IDS,
}
"""Of a composite's config, by ``model_type``, all but the language part."""
