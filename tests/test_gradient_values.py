"""Gradients of fused_experts_lora against float64, by autograd and by the operators themselves."""

from dataclasses import replace

import pytest
import torch
from cases import EDGE_CASES, Spec, random_specs, same_bits
from checks import guarded_empty
from gradient_cases import assert_gradients, by_autograd, by_hand, flat, grad_like, leaves
from quantized_cases import (
    ...,
)

import moelora
from moelora.reference import fused_experts_lora_backward_ref, fused_experts_lora_ref
