# Decides whether attention and convolutions by cuDNN are built: sets MICA_WITH_CUDNN to 1 or 0. cuDNN has
# no CMake package, so header and library are searched in the toolkit's folders and under CUDNN_ROOT; the PyPI wheels
# (nvidia-cudnn-cu13) have the same two folders.

set(MICA_WITH_CUDNN 0)
if(NOT MICA_CUDNN MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "MICA_CUDNN: expected AUTO, ON or OFF, got ${MICA_CUDNN}")
endif()
if(NOT MICA_CUDNN STREQUAL "OFF" AND MICA_WITH_CUDA)
  find_path(MICA_CUDNN_INCLUDE cudnn_graph.h HINTS ${CUDNN_ROOT} ENV CUDNN_ROOT ${CUDAToolkit_INCLUDE_DIRS}
            PATH_SUFFIXES include)
  find_library(MICA_CUDNN_LIBRARY NAMES cudnn libcudnn.so.9 HINTS ${CUDNN_ROOT} ENV CUDNN_ROOT ${CUDAToolkit_LIBRARY_DIR}
               PATH_SUFFIXES lib lib64)
  set(mica_cudnn_version 0)
  if(MICA_CUDNN_INCLUDE AND EXISTS "${MICA_CUDNN_INCLUDE}/cudnn_version.h")
    file(GLOB mica_cudnn_headers "${MICA_CUDNN_INCLUDE}/cudnn_version*.h")
    foreach(part MAJOR MINOR)
      foreach(header ${mica_cudnn_headers})
        file(STRINGS "${header}" line REGEX "#define CUDNN_${part} +[0-9]+")
        if(line)
          string(REGEX REPLACE ".* ([0-9]+).*" "\\1" mica_cudnn_${part} "${line}")
        endif()
      endforeach()
    endforeach()
    set(mica_cudnn_version ${mica_cudnn_MAJOR}.${mica_cudnn_MINOR})
  endif()
  if(MICA_CUDNN_LIBRARY AND mica_cudnn_version VERSION_GREATER_EQUAL 9.8)
    set(MICA_WITH_CUDNN 1)
  elseif(MICA_CUDNN STREQUAL "ON")
    message(FATAL_ERROR "MICA_CUDNN is ON, but cuDNN of at least 9.8 was not found; header: ${MICA_CUDNN_INCLUDE}, "
                        "version: ${mica_cudnn_version}, library: ${MICA_CUDNN_LIBRARY}. Set CUDNN_ROOT")
  endif()
endif()
message(STATUS "mica: cuDNN ${MICA_WITH_CUDNN} (MICA_CUDNN=${MICA_CUDNN})")
