# Writes <mica/mica.h>, which includes every public header. Those of ops are collected from the folders, so a new op needs
# no entry here: a header is public unless it lies in a folder named detail, or in ops/detail/gemm, ops/detail/rows or
# infer/detail/kernels.

set(mica_public_headers
    core/capture.h core/check.h core/cuda_graph.h core/device.h core/dtype.h core/shape.h core/tensor.h core/creation.h core/dlpack.h core/memory_stats.h core/progress.h
    core/rng.h core/parallel.h
    autograd/anomaly.h autograd/autocast.h autograd/checkpoint.h autograd/early_accumulation.h autograd/function.h
    autograd/grad.h autograd/grad_mode.h
    autograd/gradcheck.h autograd/graph_picture.h autograd/hooks.h autograd/missing_gradients.h autograd/node.h
    profiler/profiler.h core/device_info.h)
foreach(folder ops nn optim io infer distributed train)
  file(GLOB_RECURSE headers RELATIVE "${PROJECT_SOURCE_DIR}" CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/${folder}/*.h")
  list(FILTER headers EXCLUDE REGEX "(^|/)detail/|^ops/(gemm|rows)/|^infer/detail/kernels/")
  list(SORT headers)
  list(APPEND mica_public_headers ${headers})
endforeach()

list(TRANSFORM mica_public_headers REPLACE "(.+)" "#include <mica/\\1>")
list(JOIN mica_public_headers "\n" mica_includes)
set(MICA_GENERATED_INCLUDE "${PROJECT_BINARY_DIR}/generated")
file(CONFIGURE OUTPUT "${MICA_GENERATED_INCLUDE}/mica/mica.h" @ONLY
     CONTENT "#pragma once\n\n// All of mica's public headers; written by cmake/MicaUmbrella.cmake.\n\n@mica_includes@\n")
