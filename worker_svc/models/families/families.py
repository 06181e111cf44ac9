"""Which function reads which architecture. Adding one is described in docs/adding-a-model.md."""

from __future__ import annotations

from collections.abc import Callable

from worker_svc.models.families.before_llama import bloom, gpt2, opt
from worker_svc.models.families.deepseek import deepseek_v2, deepseek_v3
from worker_svc.models.families.gemma import gemma, gemma2, gemma3
from worker_svc.models.families.gpt_oss import gpt_oss
from worker_svc.models.families.llama import llama, mistral, mixtral, phi3, stablelm, starcoder2
from worker_svc.models.families.qwen import qwen2, qwen3, qwen3_moe
from worker_svc.models.families.sizes import Sizes
from worker_svc.models.raw_config import RawConfig
from worker_svc.models.style import DecoderStyle

Read = Callable[[RawConfig], tuple[Sizes, DecoderStyle]]


FAMILIES: dict[str, Read] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "GptOssForCausalLM": gpt_oss,
    "Phi3ForCausalLM": phi3,
    "Starcoder2ForCausalLM": starcoder2,
    "StableLmForCausalLM": stablelm,
    "GemmaForCausalLM": gemma,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "GPT2LMHeadModel": gpt2,
    "OPTForCausalLM": opt,
    "BloomForCausalLM": bloom,
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
}
