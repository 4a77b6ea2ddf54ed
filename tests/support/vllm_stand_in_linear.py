"""vLLM's linear layers with LoRA: as much as `moelora.integrations.vllm` touches.

As `vllm_stand_in`, of which this is a part.
"""

import torch
from stand_in import takes


class BaseLinearLayerWithLoRA(torch.nn.Module):
    tp_size = 1

    def create_lora_weights(self, max_loras, lora_config, model_config=None):
        r, like = lora_config.max_lora_rank, {"dtype": lora_config.lora_dtype}
        like["device"] = self.device
        widths = self.output_slices
        self.lora_a_stacked = tuple(
            torch.zeros(max_loras, 1, r, self.input_size, **like) for _ in widths
        )
        self.lora_b_stacked = tuple(torch.zeros(max_loras, 1, n, r, **like) for n in widths)

    def reset_lora(self, index):
        for stack in (*self.lora_a_stacked, *self.lora_b_stacked):
            stack[index] = 0

    def set_lora(self, index, lora_a, lora_b):
        self._fill(index, [lora_a], [lora_b])

    def _fill(self, index, lora_a, lora_b):
        self.reset_lora(index)
        stacks = *self.lora_a_stacked, *self.lora_b_stacked
        for stack, factor in zip(stacks, (*lora_a, *lora_b), strict=True):
            if factor is not None:
                stack[index, 0, : factor.shape[0], : factor.shape[1]].copy_(factor)

    def _apply_lora_to_output(self, x, output):
        stacks = self.lora_a_stacked, self.lora_b_stacked
        self.punica_wrapper.add_lora_linear(output, x, *stacks, 1.0, self.output_slices)
        return output


class MergedColumnParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    def create_lora_weights(self, max_loras, lora_config, model_config=None):
        super().create_lora_weights(max_loras, lora_config, model_config)

    def set_lora(self, index, lora_a, lora_b):
        self._fill(index, lora_a, lora_b)


class MergedColumnParallelLinearWithShardedLoRA(MergedColumnParallelLinearWithLoRA):
    pass


class LogitsProcessorWithLoRA(torch.nn.Module):
    create_lora_weights = takes(
        "self max_loras lora_config model_config", lora_config=None, model_config=None
    )
    set_lora = takes("self index lora_a lora_b")
    reset_lora = takes("self index")


class PunicaWrapperGPU:
    add_lora_linear = takes(
        "self y x lora_a_stacked lora_b_stacked scale output_slices buffer kwargs",
        buffer=None,
        kwargs=None,
    )
    add_lora_logits = takes(
        "self y x lora_a_stacked lora_b_stacked scale buffer kwargs", buffer=None, kwargs=None
    )
    add_lora_w13 = takes(
        "self y x lora_a_stacked lora_b_stacked topk_ids topk_weights expert_map w1 w2 num_tokens "
        "top_k_num max_loras adapter_enabled local_num_experts top_k num_slices fully_sharded "
        "use_tuned_config add_inputs token_lora_mapping",
        add_inputs=True,
        token_lora_mapping=None,
    )
    add_lora_w2 = takes(
        "self y x lora_a_stacked lora_b_stacked topk_weights sorted_token_ids_lora expert_ids_lora "
        "num_tokens_post_padded_lora token_lora_mapping num_tokens w1 w2 top_k_num max_loras "
        "adapter_enabled top_k fully_sharded tp_rank use_tuned_config add_inputs",
        add_inputs=True,
    )


PLACES = {
    "vllm.lora.layers.base_linear": ["BaseLinearLayerWithLoRA"],
    "vllm.lora.layers.column_parallel_linear": [
        "MergedColumnParallelLinearWithLoRA",
        "MergedColumnParallelLinearWithShardedLoRA",
    ],
    "vllm.lora.layers.logits_processor": ["LogitsProcessorWithLoRA"],
    "vllm.lora.punica_wrapper.punica_gpu": ["PunicaWrapperGPU"],
}
