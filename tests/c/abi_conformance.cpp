// Compiles only while csrc/glue/abi.h says what torch's own headers say: a function declared twice
// with different types is an error in C++, and so is a type named twice.
#define USE_CUDA 1
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include "glue/abi.h"

static_assert(MOELORA_TORCH_ABI_VERSION == TORCH_VERSION_2_11_0);
