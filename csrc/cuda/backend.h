/* Declares the functions of the backend's table. */
#pragma once

#include "core/backend.h"

#define OPERATOR(NAME, ...) moelora_##NAME##_function moelora_cuda_##NAME;
#define CONVERSION(NAME, ...) OPERATOR(NAME)
#include "core/operators.inc"

/* layer/quantized_fp8.cu */
moelora_status moelora_cuda_pack_fp8(const moelora_quantized_problem *problem,
                                     const moelora_exec *exec);
moelora_status moelora_cuda_unpack_fp8(const moelora_quantized_problem *problem,
                                       const moelora_exec *exec);
