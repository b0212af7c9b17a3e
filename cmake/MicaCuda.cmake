# Decides whether the CUDA kernels are built, and for which GPUs: sets MICA_WITH_CUDA to 1 or 0, and
# CMAKE_CUDA_ARCHITECTURES unless it is already set.

if(NOT MICA_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "MICA_CUDA: expected AUTO, ON or OFF, got ${MICA_CUDA}")
endif()

# Sets `out` to the compute capabilities of this machine's GPUs, such as 80;90, without unsupported ones. Empty without
# a GPU or a driver.
function(mica_find_gpus out)
  set(found "")
  find_program(MICA_NVIDIA_SMI nvidia-smi HINTS /usr/lib/wsl/lib /usr/local/nvidia/bin)
  mark_as_advanced(MICA_NVIDIA_SMI)
  if(MICA_NVIDIA_SMI)
    execute_process(COMMAND "${MICA_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
                    RESULT_VARIABLE status OUTPUT_VARIABLE capabilities ERROR_QUIET TIMEOUT 30)
    if(status EQUAL 0)
      string(REGEX MATCHALL "[0-9]+\\.[0-9]" found "${capabilities}")
      list(TRANSFORM found REPLACE "\\." "")
      list(REMOVE_DUPLICATES found)
      list(FILTER found EXCLUDE REGEX "^[1-7][0-9]$")
      list(SORT found COMPARE NATURAL)
    endif()
  endif()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

set(MICA_WITH_CUDA 0)
set(mica_cuda_reason "MICA_CUDA=${MICA_CUDA}")
set(mica_gpus "")
if(NOT MICA_CUDA STREQUAL "OFF" AND NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  mica_find_gpus(mica_gpus)
endif()
if(MICA_CUDA STREQUAL "AUTO" AND NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT mica_gpus)
  string(APPEND mica_cuda_reason ", and there is no GPU of compute capability 8.0 or higher")
elseif(NOT MICA_CUDA STREQUAL "OFF")
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    # Without a GPU, not CMake's default, which includes architectures that newer toolkits dropped.
    if(NOT mica_gpus)
      set(mica_gpus 80 90)
    endif()
    set(CMAKE_CUDA_ARCHITECTURES ${mica_gpus} CACHE STRING "Compute capabilities to build for")
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    find_package(CUDAToolkit 12.0 QUIET)
  endif()
  if(CMAKE_CUDA_COMPILER AND CUDAToolkit_FOUND AND TARGET CUDA::cublasLt AND TARGET CUDA::cusolver AND
     TARGET CUDA::cufft)
    enable_language(CUDA)
    set(MICA_WITH_CUDA 1)
    string(APPEND mica_cuda_reason ", for compute capability ${CMAKE_CUDA_ARCHITECTURES}")
  elseif(MICA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MICA_CUDA is ON, but nvcc and a toolkit of at least 12.0 with cuBLAS, cuSOLVER and cuFFT were "
                        "not all found; nvcc: ${CMAKE_CUDA_COMPILER}, toolkit: ${CUDAToolkit_VERSION}. Set CUDACXX to "
                        "point to nvcc")
  else()
    string(APPEND mica_cuda_reason ", and nvcc 12.0 or newer with cuBLAS, cuSOLVER and cuFFT was not found")
  endif()
endif()
# The name that find_package(mica) provides, for projects that add this folder.
set(mica_WITH_CUDA ${MICA_WITH_CUDA})
if(NOT PROJECT_IS_TOP_LEVEL)
  set(mica_WITH_CUDA ${MICA_WITH_CUDA} PARENT_SCOPE)
endif()
message(STATUS "mica: CUDA kernels ${MICA_WITH_CUDA} (${mica_cuda_reason})")
