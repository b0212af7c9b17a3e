#pragma once

#include <cstdint>
#include <string>

#include <mica/nn/module.h>

namespace mica::nn {

/// A table of a model: each module that has parameters or buffers of its own, with its class, their shapes, dtypes,
/// numbers of elements and bytes, and the totals. Tensors shared by several modules count once, under their first name.
///
///     std::cout << nn::summary(gpt);
///
///     module        class      tensors                          elements       bytes
///     wte           Embedding  weight [50304, 768] float32    38,633,472   154.5 MB
///     h.0.ln_1      LayerNorm  weight [768] float32                  768     3.1 kB
///                              bias [768] float32                    768     3.1 kB
///     …
///     124,475,904 parameters, 124,475,904 of them trained; 497.9 MB on cpu
std::string summary(Module& model);

/// The number of elements of all parameters; those shared by several modules count once.
std::int64_t parameter_count(const Module& model);

}  // namespace mica::nn
