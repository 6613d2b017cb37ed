"""vllm_mixture.py: what vLLM needs to sample from the averaged logits of two models (logit_avg_grpo.py)."""

import copy
import os

import torch
from torch import nn

from common import UserError, VLLMEngine, load_model


class MixtureForCausalLM(nn.Module):
    """Two language models of one architecture, read in step, as a model that vLLM can run.  [LA eq. 1]

    Its logits are w z_reference + (1 - w) z_policy, with w = self.ref_weight. Each half has layers of its own name,
    hence a KV cache of its own, so w may change between rollouts without a prompt being read anew.
    """

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        from vllm.model_executor.models.utils import init_vllm_registered_model, maybe_prefix

        architectures = vllm_config.model_config.hf_config.mixture_of
        for half in ("policy", "reference"):
            self.add_module(half, init_vllm_registered_model(vllm_config, prefix=maybe_prefix(prefix, half),
                                                             architectures=architectures))
        self.ref_weight = 0.5

    def embed_input_ids(self, input_ids):
        """vLLM asks for this of every model; each half embeds for itself."""
        return self.policy.embed_input_ids(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        """The hidden states of both halves, side by side: (tokens, 2 D)."""
        return torch.cat([self.policy(input_ids, positions), self.reference(input_ids, positions)], dim=-1)

    def compute_logits(self, hidden_states):
        """The mixed logits, in float32."""
        policy_ND, reference_ND = (half.contiguous() for half in hidden_states.chunk(2, dim=-1))
        policy_NV, reference_NV = self.policy.compute_logits(policy_ND), self.reference.compute_logits(reference_ND)
        return self.ref_weight * reference_NV.float() + (1 - self.ref_weight) * policy_NV.float()

    def load_weights(self, weights):
        """Weights are named policy.<name> and reference.<name>; a half without any keeps those that it has."""
        from vllm.model_executor.models.utils import AutoWeightsLoader

        return AutoWeightsLoader(self).load_weights(weights)


class VLLMMixtureEngine(VLLMEngine):
    """VLLMEngine for the mixture of a policy and a frozen reference of the same shape: `ref_weight` is w, at any time.

    load_weights takes the policy's weights, under their own names. The reference's stay, in host memory during sleep.
    """

    reference = True        # tells common.evaluate_step that there are two halves to measure

    def __init__(self, model_name, ref_name, tokenizer, cfg, device, ref_weight):
        from vllm import ModelRegistry

        # Of two halves of one class, the second would load the compiled code of the first, with its KV cache's name.
        os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"
        ModelRegistry.register_model("MixtureForCausalLM", MixtureForCausalLM)
        policy, reference = load_model(model_name), load_model(ref_name)
        shapes = [{name: tensor.shape for name, tensor in model.state_dict().items()} for model in (policy, reference)]
        if shapes[0] != shapes[1]:
            raise UserError(f"--ref_model {ref_name} and {model_name} differ in shape, which vLLM's mixture can't "
                            "take: use --engine hf.")
        preserve = {"sleep_preserve_parameter_names": ["reference.*"]} if device.type == "cuda" else {}
        super().__init__(model_name, tokenizer, cfg, device, load_format="dummy", **preserve, hf_overrides={
            "architectures": ["MixtureForCausalLM"], "mixture_of": policy.config.architectures})
        both = [(f"{half}.{name}", tensor) for half, model in (("policy", policy), ("reference", reference))
                for name, tensor in model.state_dict().items()]
        self.names = {name for name, _ in both}
        super().load_weights(both)
        self.names = {name for name, _ in both if name.startswith("policy.")}       # from now on, the policy's alone
        self.ref_weight = ref_weight

    def at(self, ref_weight):
        """This engine at another weight of the reference: 0 is the policy alone, 1 the reference alone."""
        other = copy.copy(self)
        other.ref_weight = ref_weight
        return other

    def load_weights(self, named_tensors):
        """Copy the policy's weights in; the reference's stay."""
        super().load_weights((f"policy.{name}", tensor) for name, tensor in named_tensors)

    def generate(self, prompts, n, max_new_tokens, temperature=1.0, seed=0):
        """As VLLMEngine.generate, from the mixture at self.ref_weight."""
        self.llm.apply_model(lambda model: setattr(model, "ref_weight", self.ref_weight))
        return super().generate(prompts, n, max_new_tokens, temperature, seed)
