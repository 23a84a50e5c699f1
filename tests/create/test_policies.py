"""Which precision each tensor gets: the published inventory of Flash Next in bytes, and the rules of each family."""

import math
from collections.abc import Iterator

import pytest

from arriero.create.policies import Tensor, policy_for
from arriero.create.precisions import PACKED

HIDDEN, STREAMS, RANK, VOCABULARY, EXPERTS, WIDTH = 2560, 4, 320, 248320, 512, 640
TEXT = "model.language_model."


def _connection(prefix: str, inject: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
    wide = STREAMS * HIDDEN
    yield f"{prefix}.hc_norm.weight", (wide,)
    yield f"{prefix}.input_mix_weight_down.weight", (RANK, wide)
    yield f"{prefix}.input_mix_weight_up.weight", (wide, RANK)
    if inject:
        yield f"{prefix}.block_inject_weight.weight", (STREAMS, wide)


def _attention(prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in {
        "q_proj": (12288, HIDDEN), "k_proj": (512, HIDDEN), "v_proj": (512, HIDDEN), "o_proj": (HIDDEN, 6144),
        "q_norm": (256,), "k_norm": (256,), "indexer.index_qk_proj": (640, HIDDEN), "indexer.q_layernorm": (128,),
        "indexer.k_layernorm": (128,),
    }.items():  # fmt: skip
        yield f"{prefix}.{name}.weight", shape


def _mixture(prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate.weight", (EXPERTS, HIDDEN)
    yield f"{prefix}.experts.gate_up_proj", (EXPERTS, 2 * WIDTH, HIDDEN)
    yield f"{prefix}.experts.down_proj", (EXPERTS, HIDDEN, WIDTH)
    for name, shape in {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}.items():
        yield f"{prefix}.shared_expert.{name}.weight", shape
    yield f"{prefix}.shared_expert_gate.weight", (1, HIDDEN)


def flash_next() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the published bfloat16 repository (its three integer tensors left out)."""
    yield f"{TEXT}embed_tokens.weight", (VOCABULARY, HIDDEN)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)
    for index in range(48):
        layer = f"{TEXT}layers.{index}"
        yield from _connection(f"{layer}.attn_hyper_connection")
        yield from _connection(f"{layer}.mlp_hyper_connection")
        yield from _mixture(f"{layer}.mlp")
        if index % 4 == 3:
            yield from _attention(f"{layer}.self_attn")
            continue
        for name, shape in {
            "in_proj_qkv.weight": (10240, HIDDEN), "in_proj_z.weight": (6144, HIDDEN), "in_proj_a.weight": (48, HIDDEN),
            "in_proj_b.weight": (48, HIDDEN), "out_proj.weight": (HIDDEN, 6144), "conv1d.weight": (10240, 1, 4),
            "norm.weight": (128,), "A_log": (48,), "dt_bias": (48,),
        }.items():  # fmt: skip
            yield f"{layer}.linear_attn.{name}", shape
    ple = f"{TEXT}layers.1.ple"
    wide = STREAMS * HIDDEN
    for name, shape in {
        "key_proj": (wide, HIDDEN), "value_proj": (HIDDEN, HIDDEN), "norm_key": (wide,), "norm_query": (wide,),
        "norm_conv": (wide,), "conv1d": (wide, 1, 4),
    }.items():  # fmt: skip
        yield f"{ple}.{name}.weight", shape
    for shard in range(128):
        yield f"{ple}.ple_embedding.ngram_embedding.shard_{shard}.weight", (2500012, 160)
    yield from _connection(f"{TEXT}hyper_connection_mixer", inject=False)
    yield "mtp.pre_fc_norm_embedding.weight", (HIDDEN,)
    yield "mtp.pre_fc_norm_hidden.weight", (wide,)
    yield "mtp.fc_embedding.weight", (HIDDEN, HIDDEN)
    yield "mtp.fc_hidden.weight", (HIDDEN, HIDDEN)
    yield from _connection("mtp.layers.0.attn_hyper_connection")
    yield from _connection("mtp.layers.0.mlp_hyper_connection")
    yield from _attention("mtp.layers.0.self_attn")
    yield from _mixture("mtp.layers.0.mlp")
    yield from _connection("mtp.hyper_connection_mixer", inject=False)
    visual = "model.visual"
    for index in range(27):
        for name, shape in {
            "norm1.weight": (1152,), "norm1.bias": (1152,), "norm2.weight": (1152,), "norm2.bias": (1152,),
            "attn.qkv.weight": (3456, 1152), "attn.qkv.bias": (3456,), "attn.proj.weight": (1152, 1152),
            "attn.proj.bias": (1152,), "mlp.linear_fc1.weight": (4304, 1152), "mlp.linear_fc1.bias": (4304,),
            "mlp.linear_fc2.weight": (1152, 4304), "mlp.linear_fc2.bias": (1152,),
        }.items():  # fmt: skip
            yield f"{visual}.blocks.{index}.{name}", shape
    for name, shape in {
        "patch_embed.proj.weight": (1152, 3, 2, 16, 16), "patch_embed.proj.bias": (1152,),
        "pos_embed.weight": (2304, 1152), "merger.norm.weight": (1152,), "merger.norm.bias": (1152,),
        "merger.linear_fc1.weight": (4608, 4608), "merger.linear_fc1.bias": (4608,),
        "merger.linear_fc2.weight": (HIDDEN, 4608), "merger.linear_fc2.bias": (HIDDEN,),
    }.items():  # fmt: skip
        yield f"{visual}.{name}", shape


def config(architecture: str, **fields: object) -> dict[str, object]:
    return {"architectures": [architecture], **fields}


FLASH_NEXT = config("Qwen4ExpForConditionalGeneration", text_config={"num_hidden_layers": 48, "num_experts": EXPERTS})


def test_the_inventory_of_flash_next_is_the_published_one():
    found = dict(flash_next())
    assert len(found) + 3 == 1658
    assert 2 * sum(map(math.prod, found.values())) + 8 * (3 + 16 + 16) == 359_999_963_128


def test_flash_next_at_nvfp4_takes_97_8_gib_with_its_tables_and_71_0_without():
    policy = policy_for(FLASH_NEXT)
    whole = tables = 0.0
    for name, shape in flash_next():
        kind = policy(Tensor(name, shape), "nvfp4")
        bits = PACKED[kind].bits + 8 / PACKED[kind].group_size if kind else 16
        nbytes = math.prod(shape) * bits / 8
        whole += nbytes
        tables += nbytes if "ngram_embedding" in name else 0
    assert round(whole / 2**30, 1) == 97.8
    assert round((whole - tables) / 2**30, 1) == 71.0


@pytest.mark.parametrize(
    ("asked", "kinds"),
    [
        (
            "nvfp4",
            {
                f"{TEXT}layers.3.self_attn.q_proj.weight": "",
                f"{TEXT}layers.3.self_attn.o_proj.weight": "",
                f"{TEXT}layers.3.self_attn.indexer.index_qk_proj.weight": "",
                f"{TEXT}layers.0.linear_attn.out_proj.weight": "mxfp8",
                f"{TEXT}layers.0.linear_attn.in_proj_a.weight": "",
                f"{TEXT}layers.0.attn_hyper_connection.input_mix_weight_down.weight": "mxfp8",
                f"{TEXT}layers.0.mlp.experts.gate_up_proj": "nvfp4",
                f"{TEXT}layers.0.mlp.experts.down_proj": "nvfp4",
                f"{TEXT}layers.0.mlp.gate.weight": "",
                f"{TEXT}embed_tokens.weight": "mxfp8",
                "lm_head.weight": "mxfp8",
                "mtp.layers.0.self_attn.q_proj.weight": "",
                "mtp.fc_hidden.weight": "",
                "mtp.layers.0.mlp.experts.down_proj": "nvfp4",
                "model.visual.blocks.0.attn.qkv.weight": "",
                f"{TEXT}layers.1.ple.ple_embedding.ngram_embedding.shard_10.weight": "nvfp4",
            },
        ),
        (
            "mxfp8",
            {
                f"{TEXT}layers.3.self_attn.q_proj.weight": "mxfp8",
                f"{TEXT}embed_tokens.weight": "",
                f"{TEXT}layers.1.ple.ple_embedding.ngram_embedding.shard_10.weight": "mxfp8",
            },
        ),
    ],
)
def test_tensors_of_flash_next(asked, kinds):
    policy, shapes = policy_for(FLASH_NEXT), dict(flash_next())
    assert {name: policy(Tensor(name, shapes[name]), asked) for name in kinds} == kinds


SQUARE = (256, 256)
LLAMA = config("LlamaForCausalLM", num_hidden_layers=16)
GEMMA = config("Gemma4ForCausalLM", num_hidden_layers=16, num_experts=8)
LAGUNA = config("LagunaForCausalLM", num_hidden_layers=40)
NEMOTRON = config("NemotronHForCausalLM", num_hidden_layers=16)
COHERE = config("Cohere2MoeForCausalLM", num_hidden_layers=16)


@pytest.mark.parametrize(
    ("model", "asked", "name", "shape", "kind"),
    [
        (LLAMA, "int4", "model.layers.4.self_attn.q_proj.weight", SQUARE, "int4"),
        (LLAMA, "int4", "model.layers.4.self_attn.v_proj.weight", SQUARE, "int8"),
        (LLAMA, "nvfp4", "model.layers.4.mlp.down_proj.weight", SQUARE, "mxfp8"),
        (LLAMA, "nvfp4", "model.layers.4.mlp.experts.down_proj.weight", (4, 256, 256), "nvfp4"),
        (LLAMA, "int4", "model.layers.4.mlp.experts.3.down_proj.weight", SQUARE, "int8"),
        (LLAMA, "mxfp8", "model.layers.4.mlp.down_proj.weight", SQUARE, "mxfp8"),
        (LLAMA, "int4", "lm_head.weight", SQUARE, "int8"),
        (LLAMA, "mxfp4", "lm_head.weight", (256, 40), ""),
        (LLAMA, "int4", "model.embed_tokens.weight", SQUARE, ""),
        (LLAMA, "int4", "model.layers.4.input_layernorm.weight", (256,), ""),
        (LLAMA, "int4", "model.layers.4.mlp.gate.weight", (8, 256), ""),
        (LLAMA, "int4", "model.layers.4.self_attn.q_proj.weight", (8, 96), ""),
        (LLAMA, "nvfp4", "model.layers.4.self_attn.q_proj.weight", (8, 96), ""),
        (LLAMA, "nvfp4", "model.layers.4.self_attn.q_proj.weight", (64, 96), "nvfp4"),
        (LLAMA, "int4", "model.layers.4.self_attn.q_proj.weight", (16, 64), "int4"),
        (LLAMA, "int4", "model.layers.4.self_attn.q_proj.weight", (15, 64), ""),
        (LLAMA, "int4", "vision_tower.layers.1.fc1.weight", SQUARE, ""),
        (LLAMA, "bf16", "model.layers.4.input_layernorm.weight", (256,), ""),
        (LLAMA, "bf16", "model.embed_tokens.weight", SQUARE, "bf16"),
        (GEMMA, "int4", "model.embed_tokens.weight", SQUARE, "int8"),
        (GEMMA, "int4", "model.embed_tokens_per_layer.weight", SQUARE, ""),
        (GEMMA, "nvfp4", "model.layers.4.self_attn.k_proj.weight", SQUARE, "mxfp8"),
        (GEMMA, "nvfp4", "model.layers.3.mlp.down_proj.weight", SQUARE, "nvfp4"),
        (GEMMA, "nvfp4", "model.layers.4.mlp.down_proj.weight", SQUARE, "mxfp8"),
        (COHERE, "int4", "model.layers.3.self_attn.v_proj.weight", SQUARE, "int4"),
        (COHERE, "int4", "model.layers.0.self_attn.v_proj.weight", SQUARE, "int8"),
        (LAGUNA, "nvfp4", "model.layers.9.self_attn.v_proj.weight", SQUARE, "nvfp4"),
        (LAGUNA, "mxfp8", "model.layers.9.self_attn.v_proj.weight", SQUARE, ""),
        (LAGUNA, "nvfp4", "model.layers.7.mlp.shared_expert.down_proj.weight", SQUARE, "mxfp8"),
        (LAGUNA, "nvfp4", "model.layers.8.mlp.shared_expert.down_proj.weight", SQUARE, "nvfp4"),
        (NEMOTRON, "nvfp4", "backbone.layers.5.mixer.q_proj.weight", SQUARE, "mxfp8"),
        (NEMOTRON, "nvfp4", "backbone.layers.5.mixer.out_proj.weight", SQUARE, "nvfp4"),
        (NEMOTRON, "nvfp4", "backbone.layers.4.mixer.out_proj.weight", SQUARE, "mxfp8"),
        (NEMOTRON, "int4", "backbone.embeddings.weight", SQUARE, "int8"),
        (config("GptOssForCausalLM"), "int4", "model.layers.0.mlp.experts.gate_up_proj", (4, 256, 512), ""),
        (config("Qwen3NextForCausalLM"), "int4", "model.layers.0.linear_attn.in_proj_ba.weight", SQUARE, ""),
    ],
)  # fmt: skip
def test_a_policy_gives_this_tensor(model, asked, name, shape, kind):
    assert policy_for(model)(Tensor(name, shape), asked) == kind
