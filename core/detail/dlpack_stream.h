#pragma once

#include <cstdint>

#include <mica/core/dispatch.h>

namespace mica::dlpack {

/// Implement dlpack_wait().
inline void make_wait(Cpu, std::intptr_t) {}
void make_wait(Cuda, std::intptr_t stream);

}  // namespace mica::dlpack
