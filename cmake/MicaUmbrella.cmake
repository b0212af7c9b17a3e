# Writes <mica/mica.h>, which includes all public headers: those outside of folders named detail. The headers in
# core/cuda are public, too, but not in it, since they need CUDA's headers: programs with kernels include them.

set(mica_public_headers "")
foreach(folder ${mica_folders})
  file(GLOB_RECURSE headers RELATIVE "${PROJECT_SOURCE_DIR}" CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/${folder}/*.h")
  list(FILTER headers EXCLUDE REGEX "/detail/|^core/cuda/")
  list(SORT headers)
  list(APPEND mica_public_headers ${headers})
endforeach()

list(TRANSFORM mica_public_headers REPLACE "(.+)" "#include <mica/\\1>")
list(JOIN mica_public_headers "\n" mica_includes)
set(MICA_GENERATED_INCLUDE "${PROJECT_BINARY_DIR}/generated")
# With an older standard, compilers would report hundreds of errors. A missing file, unlike #error, is the only one.
file(CONFIGURE OUTPUT "${MICA_GENERATED_INCLUDE}/mica/mica.h" @ONLY
     CONTENT "#pragma once

// All of mica's public headers; written by cmake/MicaUmbrella.cmake.

#if __cplusplus < 202002L
#include \"mica needs C++20: compile with -std=c++20\"
#endif

@mica_includes@
")
