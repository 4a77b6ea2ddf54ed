/* The functions of PyTorch's stable C ABI that moelora uses; torch 2.11 and later have them.
 *
 * They are declared here because torch's own headers are C++. tests/c/abi_conformance.cpp includes
 * both and fails to compile if a prototype differs. CPU builds of torch lack the weak functions
 * (NULL). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct AtenTensorOpaque *AtenTensorHandle;
typedef struct StableListOpaque *StableListHandle;
typedef struct CUDAGuardOpaque *CUDAGuardHandle;
#ifdef __cplusplus
typedef class TorchLibraryOpaque *TorchLibraryHandle;
#else
typedef struct TorchLibraryOpaque *TorchLibraryHandle;
#endif
typedef int32_t AOTITorchError; /* 0 is success */
typedef uint64_t StableIValue;  /* an int, a bool, the bits of a float, or an owned handle */

/* Layout of StableIValue that our boxed functions expect: that of torch 2.11. */
#define MOELORA_TORCH_ABI_VERSION ((uint64_t)2 << 56 | (uint64_t)11 << 48)

/* constants */
int32_t aoti_torch_device_type_cpu(void);
int32_t aoti_torch_device_type_cuda(void);
int32_t aoti_torch_device_type_meta(void);
#define CODE(dtype) int32_t aoti_torch_dtype_##dtype(void);
MOELORA_DTYPES(CODE)
MOELORA_FOREIGN_DTYPES(CODE)
#undef CODE

/* tensors; sizes and strides are borrowed, handles are owned */
AOTITorchError aoti_torch_is_defined(AtenTensorHandle tensor, bool *ret_is_defined);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t *ret_dim);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t **ret_sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t **ret_strides);
AOTITorchError aoti_torch_get_numel(AtenTensorHandle tensor, int64_t *ret_numel);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t *ret_dtype);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t *ret_device_type);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t *ret_device_index);
AOTITorchError aoti_torch_get_storage_offset(AtenTensorHandle tensor, int64_t *ret_storage_offset);
AOTITorchError aoti_torch_get_storage_size(AtenTensorHandle tensor, int64_t *ret_size); /* bytes */
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void **ret_data_ptr);
AOTITorchError aoti_torch_empty_strided(int64_t ndim, const int64_t *sizes_ptr,
                                        const int64_t *strides_ptr, int32_t dtype,
                                        int32_t device_type, int32_t device_index,
                                        AtenTensorHandle *ret_new_tensor);
AOTITorchError aoti_torch_zero_(AtenTensorHandle self);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);

/* lists; callers own the elements they take */
AOTITorchError torch_list_size(StableListHandle list_handle, size_t *size);
AOTITorchError torch_list_get_item(StableListHandle list_handle, size_t index,
                                   StableIValue *element);
AOTITorchError torch_delete_list(StableListHandle list_handle);

/* the registry of operators */
AOTITorchError aoti_torch_library_init_def(const char *ns, const char *file, uint32_t line,
                                           TorchLibraryHandle *ret_new_torch_lib);
AOTITorchError aoti_torch_library_init_impl(const char *ns, const char *k, const char *file,
                                            uint32_t line, TorchLibraryHandle *ret_new_torch_lib);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle self, const char *schema);
AOTITorchError torch_library_impl(TorchLibraryHandle self, const char *name,
                                  void (*fn)(StableIValue *, uint64_t, uint64_t),
                                  uint64_t extension_build_version);

/* torch's thread pool */
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size,
                                  void (*func)(int64_t begin, int64_t end, void *ctx), void *ctx);
AOTITorchError torch_get_num_threads(uint32_t *out_num_threads);

/* unless cond, raises a C++ exception that arrives in Python as RuntimeError */
void aoti_torch_check(bool cond, const char *func, const char *file, uint32_t line,
                      const char *msg);

/* CUDA */
AOTITorchError aoti_torch_get_current_device_index(int32_t *ret_device_index);
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                        void **ret_stream);
__attribute__((weak)) AOTITorchError aoti_torch_create_cuda_guard(int32_t device_index,
                                                                  CUDAGuardHandle *ret_guard);
__attribute__((weak)) AOTITorchError aoti_torch_delete_cuda_guard(CUDAGuardHandle guard);

#ifdef __cplusplus
}
#endif
