// A libcuda.so.1 without a GPU: its memory is files in memory, at addresses that the CPU cannot
// touch. C, so that Python can call it.
#pragma once

#include <cstddef>

extern "C" {

// Memory of a GPU, and what is in it.
unsigned long long fake_cuda_alloc(std::size_t size);
void fake_cuda_store(unsigned long long address, const void* from, std::size_t size);
void fake_cuda_load(unsigned long long address, void* to, std::size_t size);

// Of the memory files' descriptors that have been exported, how many are open in this process.
int fake_cuda_open_exports();
int fake_cuda_exports();
// The range that was exported last, and how many contexts were pushed and not popped at that time;
// how many are now.
unsigned long long fake_cuda_exported_address();
std::size_t fake_cuda_exported_size();
int fake_cuda_contexts_at_export();
int fake_cuda_contexts();
// CUresult of exports from now on; 0 for success.
void fake_cuda_fail_exports(int error);

}  // extern "C"
