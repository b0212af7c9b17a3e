# Compile options and link libraries of the library.

# Includes are written <mica/core/tensor.h>, in the source tree and after installation.
file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/include")
file(CREATE_LINK "${PROJECT_SOURCE_DIR}" "${PROJECT_BINARY_DIR}/include/mica" SYMBOLIC)
target_include_directories(mica PUBLIC $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include>
                                       $<BUILD_INTERFACE:${MICA_GENERATED_INCLUDE}>
                                       $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_include_directories(mica SYSTEM PRIVATE ${MICA_EIGEN_INCLUDE} ${MICA_JSON_INCLUDE})
target_link_libraries(mica PUBLIC fmt::fmt PRIVATE Threads::Threads)
target_compile_definitions(mica PUBLIC MICA_WITH_CUDA=${MICA_WITH_CUDA})
# No DEFINE_SYMBOL: objects are the same for a static and a shared library, so a compiler cache serves both.
set_target_properties(mica PROPERTIES CXX_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON DEFINE_SYMBOL "")

target_link_libraries(mica PRIVATE ${CMAKE_DL_LIBS})
if(MICA_WITH_LIBBACKTRACE)
  target_link_libraries(mica PRIVATE backtrace)
  target_compile_definitions(mica PRIVATE MICA_WITH_LIBBACKTRACE=1)
endif()

# Each used by one file only.
target_link_libraries(mica PRIVATE ${MICA_UTF8PROC_LIBRARY})
target_include_directories(mica SYSTEM PRIVATE ${MICA_UTF8PROC_INCLUDE})
set_source_files_properties(io/detail/regular_expression.cpp PROPERTIES
                            COMPILE_DEFINITIONS "MICA_WITH_ONIGURUMA=${MICA_WITH_ONIGURUMA}"
                            SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON)
if(MICA_WITH_ONIGURUMA)
  target_include_directories(mica SYSTEM PRIVATE ${MICA_ONIGURUMA_INCLUDE})
endif()

if(MICA_WITH_MPI)
  # Only one file gets MPI's headers, so that all others compile as they do without MPI.
  target_link_libraries(mica PRIVATE $<LINK_ONLY:MPI::MPI_CXX>)
  set_source_files_properties(distributed/detail/transport/mpi.cpp PROPERTIES
                              INCLUDE_DIRECTORIES "${MPI_CXX_INCLUDE_DIRS}"
                              COMPILE_DEFINITIONS "${MPI_CXX_COMPILE_DEFINITIONS}" SKIP_PRECOMPILE_HEADERS ON)
endif()
# Used by one file only.
set_source_files_properties(distributed/world.cpp PROPERTIES
  COMPILE_DEFINITIONS "MICA_WITH_MPI=${MICA_WITH_MPI};MICA_WITH_NCCL=${MICA_WITH_NCCL}" SKIP_PRECOMPILE_HEADERS ON)
if(MICA_WITH_NCCL)
  target_link_libraries(mica PRIVATE ${MICA_NCCL_LIBRARY})
  set_source_files_properties(distributed/detail/transport/nccl_cuda.cpp PROPERTIES
                              INCLUDE_DIRECTORIES ${MICA_NCCL_INCLUDE} SKIP_PRECOMPILE_HEADERS ON)
endif()

# Each is used by one file.
target_link_libraries(mica PRIVATE ${mica_reader_libraries})
foreach(reader PNG JPEG ZLIB)
  string(TOLOWER ${reader} file)
  set_property(SOURCE io/detail/${file}.cpp APPEND PROPERTY COMPILE_DEFINITIONS
               MICA_WITH_${reader}=${MICA_WITH_${reader}})
  set_source_files_properties(io/detail/${file}.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON)
endforeach()

set(mica_cxx $<COMPILE_LANGUAGE:CXX>)
target_compile_options(mica PRIVATE $<${mica_cxx}:-Wall -Wextra -Wpedantic>)
# g++ 12 warns about uninitialized variables in its own AVX-512 intrinsics.
target_compile_options(mica PRIVATE
                       $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-uninitialized -Wno-maybe-uninitialized>)
# A project that adds this folder may have no build type. Without optimization, kernels take up to 100 times as long.
set(mica_release $<CONFIG:Release>)
string(TOUPPER "${CMAKE_BUILD_TYPE}" mica_build_type)
if(NOT mica_build_type STREQUAL "DEBUG" AND NOT CMAKE_CONFIGURATION_TYPES AND
   NOT "${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${mica_build_type}}" MATCHES "(^| )-O")
  target_compile_options(mica PRIVATE $<${mica_cxx}:-O2>)
  set(mica_release 1)
endif()
# Full vectorization, but not the rest of -O3, which made builds take twice as long and programs no faster.
target_compile_options(mica PRIVATE
  $<$<AND:$<COMPILE_LANG_AND_ID:CXX,GNU>,${mica_release}>:-O2 -ftree-vectorize -fvect-cost-model=dynamic>)
# No kernel reads errno or uses traps; without these options, loops that call sqrt or compare do not vectorize.
target_compile_options(mica PRIVATE $<${mica_cxx}:-fno-math-errno -fno-trapping-math>)
# Template loops are marked as vectorizable; clang warns for types that it cannot vectorize.
target_compile_options(mica PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wno-pass-failed>)
# Variants of a kernel must be bit-identical, so the compiler must not choose where to fuse multiplications and
# additions. Vectors are never passed between files, so the warning about their ABI does not apply.
set_source_files_properties(ops/norm/detail/norm_cpu.cpp PROPERTIES COMPILE_OPTIONS "-ffp-contract=off;-Wno-psabi")
# Quantized blocks must be bit-identical to those of ggml.
set_source_files_properties(io/detail/gguf_blocks.cpp PROPERTIES COMPILE_OPTIONS "-ffp-contract=off")
if(MICA_WERROR)
  target_compile_options(mica PRIVATE $<${mica_cxx}:-Werror>)
endif()
# Headers take half of a small file's compile time. With a compiler cache, precompiled headers are off: ccache would not
# cache the files, and builds without them detect missing includes.
if(MICA_PRECOMPILE)
  set(mica_precompiled <mica/autograd/function.h <mica/core/dispatch.h <algorithm <cmath)
  list(TRANSFORM mica_precompiled REPLACE "(.+)" "$<${mica_cxx}:\\1$<ANGLE-R>>")
  target_precompile_headers(mica PRIVATE ${mica_precompiled})
  # Compiled with other options than the precompiled headers.
  set_source_files_properties(ops/attention/fused_attention.cpp ops/norm/detail/norm_cpu.cpp io/detail/gguf_blocks.cpp
                              PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
endif()
# Compile several small files at once, since they mostly include the same headers. Kernels are compiled separately, so
# that cores share the work.
# cudnn_graph.cpp has a class of the same name as cublas.cpp.
set(mica_not_in_unity "_cpu\\.cpp$|/cudnn_[a-z_]*\\.cpp$|_cuda\\.cpp$|\\.cu$")
if(MICA_UNITY)
  set(mica_apart ${mica_sources})
  if(MICA_UNITY_APART)
    string(APPEND mica_not_in_unity "|${MICA_UNITY_APART}")
  endif()
  list(FILTER mica_apart INCLUDE REGEX "${mica_not_in_unity}")
  set_source_files_properties(${mica_apart} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  set_target_properties(mica PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${MICA_UNITY_BATCH})
  # It treats a source that another one includes as a header.
  target_compile_options(mica PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
endif()
include(CheckCXXCompilerFlag)
# This file tells which instructions the CPU lacks, so it must do without them, whatever the options of the others.
check_cxx_compiler_flag(-march=x86-64 MICA_HAS_X86_64)
if(MICA_HAS_X86_64)
  set_source_files_properties(core/check.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON
                              COMPILE_OPTIONS -march=x86-64)
endif()
# Callers detect these instructions at run time.
check_cxx_compiler_flag("-mavx512bf16 -mamx-bf16" MICA_HAS_AMX)
if(MICA_HAS_AMX)
  set_source_files_properties(ops/gemm/detail/bfloat16_tiles_x86.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON
                              COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512vl;-mavx512bf16;-mamx-tile;-mamx-bf16")
endif()
if(MICA_NATIVE)
  if(CMAKE_CROSSCOMPILING)
    message(FATAL_ERROR "MICA_NATIVE is ON, but this build is for another machine. Set it to OFF, and CMAKE_CXX_FLAGS "
                        "to -march=... for the CPU that programs run on")
  endif()
  check_cxx_compiler_flag(-march=native MICA_HAS_NATIVE)
  if(MICA_HAS_NATIVE)
    target_compile_options(mica PRIVATE $<${mica_cxx}:-march=native>)
  endif()
  # Compilers that do not recognize the CPU would use only half of its vector width.
  check_cxx_compiler_flag(-mprefer-vector-width=512 MICA_HAS_VECTOR_WIDTH)
  if(MICA_HAS_VECTOR_WIDTH)
    target_compile_options(mica PRIVATE $<${mica_cxx}:-mprefer-vector-width=512>)
  endif()
endif()
if(MICA_SANITIZE)
  target_compile_options(mica PUBLIC $<${mica_cxx}:-fsanitize=${MICA_SANITIZE} -fno-sanitize-recover=all
                                    -fno-omit-frame-pointer>)
  # GCC defines its own macros for these options, Clang does not.
  string(REPLACE "," ";" mica_sanitizers "${MICA_SANITIZE}")
  foreach(sanitizer IN ITEMS address thread)
    if(sanitizer IN_LIST mica_sanitizers)
      string(TOUPPER MICA_${sanitizer}_SANITIZER definition)
      target_compile_definitions(mica PUBLIC ${definition})
    endif()
  endforeach()
  target_link_options(mica PUBLIC -fsanitize=${MICA_SANITIZE})
  # These checks take two thirds of the time to compile a kernel. AddressSanitizer finds the accesses that they predict.
  if("undefined" IN_LIST mica_sanitizers AND "address" IN_LIST mica_sanitizers)
    target_compile_options(mica PUBLIC $<${mica_cxx}:-fno-sanitize=null,pointer-overflow,object-size>)
  endif()
  # Of what AddressSanitizer checks, only kernels are optimized. Optimizing the rest, which grows by the checks, would
  # take longer than it saves when tests run.
  if("address" IN_LIST mica_sanitizers)
    set(mica_kernels ${mica_sources})
    list(FILTER mica_kernels INCLUDE REGEX "_cpu\\.cpp$|/ops/gemm/")
    list(REMOVE_ITEM mica_sources ${mica_kernels})
    set_property(TARGET mica PROPERTY SOURCES ${mica_sources})
    add_library(mica_kernels OBJECT ${mica_kernels})
    foreach(property INCLUDE_DIRECTORIES COMPILE_DEFINITIONS COMPILE_OPTIONS)
      set_property(TARGET mica_kernels PROPERTY ${property} $<TARGET_PROPERTY:mica,${property}>)
    endforeach()
    target_include_directories(mica_kernels SYSTEM PRIVATE ${MICA_EIGEN_INCLUDE})
    set_target_properties(mica_kernels PROPERTIES CXX_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON)
    target_compile_features(mica_kernels PRIVATE cxx_std_20)
    target_link_libraries(mica_kernels PRIVATE fmt::fmt Threads::Threads)
    target_compile_options(mica_kernels PRIVATE -O1)
    if(MICA_PRECOMPILE)
      target_precompile_headers(mica_kernels PRIVATE ${mica_precompiled})
    endif()
    target_sources(mica PRIVATE $<TARGET_OBJECTS:mica_kernels>)
  endif()
endif()

if(MICA_FUZZ)
  target_compile_options(mica PRIVATE $<${mica_cxx}:-fsanitize=fuzzer-no-link>)
endif()

if(MICA_WITH_CUDA)
  target_link_libraries(mica PUBLIC CUDA::cudart PRIVATE CUDA::cublas CUDA::cublasLt CUDA::cusolver CUDA::cufft)
  # Programs that use no linear algebra and no Fourier transforms do not load these libraries, which are large.
  target_link_options(mica INTERFACE LINKER:--as-needed)
  # Used by these files only.
  set_property(SOURCE ops/attention/fused_attention.cpp ops/conv/detail/conv_cuda.cpp APPEND PROPERTY
               COMPILE_DEFINITIONS MICA_WITH_CUDNN=${MICA_WITH_CUDNN})
  if(MICA_WITH_CUDNN)
    target_include_directories(mica SYSTEM PRIVATE ${MICA_CUDNN_INCLUDE})
    target_link_libraries(mica PRIVATE ${MICA_CUDNN_LIBRARY})
  endif()
  # Options of nvcc that the headers need, for mica's and for users' kernels. CMake 3.25 does not know C++20 for nvcc
  # 13, so the flag is passed explicitly.
  set(mica_cuda $<COMPILE_LANGUAGE:CUDA>)
  target_compile_options(mica PUBLIC $<${mica_cuda}:-std=c++20 --expt-relaxed-constexpr --extended-lambda>
                              PRIVATE $<${mica_cuda}:-Xcompiler=-Wall,-Wextra>)
  # Compressed machine code takes half of the space; the driver decompresses it when it loads a kernel. Drivers for
  # toolkits before CUDA 13 may not know the smallest format.
  set(mica_compress -Xfatbin=-compress-all)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    set(mica_compress --compress-mode=size)
  endif()
  target_compile_options(mica PRIVATE $<${mica_cuda}:${mica_compress}>)
  # An optimizer's step has the same bits for float32 parameters and float32 master weights, aligned or not, so the
  # compiler does not choose where to fuse a product and a sum.
  set_source_files_properties(optim/detail/optimizer_steps_cuda.cu PROPERTIES COMPILE_OPTIONS "--fmad=false")
  if(MICA_DEVICE_SYNTAX_ONLY)
    set(mica_parsed_sources ${mica_cuda_sources})
    list(FILTER mica_parsed_sources INCLUDE REGEX "${MICA_DEVICE_SYNTAX_ONLY}")
    list(FILTER mica_parsed_sources INCLUDE REGEX "\\.cu$")
    set_property(SOURCE ${mica_parsed_sources} APPEND PROPERTY COMPILE_OPTIONS "-fdevice-syntax-only")
  endif()
  if(MICA_PTXAS_VERBOSE)
    target_compile_options(mica PRIVATE $<${mica_cuda}:-Xptxas=-v>)
  endif()
  if(MICA_WERROR)
    target_compile_options(mica PRIVATE $<${mica_cuda}:-Werror=all-warnings -Xcompiler=-Werror>)
  endif()
  if(MICA_SANITIZE)
    target_compile_options(mica PRIVATE $<${mica_cuda}:-Xcompiler=-fsanitize=${MICA_SANITIZE}>)
  endif()

  # Files named *_sm90.cu use instructions of compute capability 9.0 only (wgmma, setmaxnreg), which require the
  # architecture 90a in place of 90. For other architectures these kernels are empty, and the host, which checks
  # cuda::device_has_wgmma(), uses the kernel for all GPUs.
  set(mica_sm90_architectures ${CMAKE_CUDA_ARCHITECTURES})
  list(TRANSFORM mica_sm90_architectures REPLACE "^90$" "90a")
  list(TRANSFORM mica_sm90_architectures REPLACE "^90-" "90a-")
  set(mica_sm90 0)
  if(mica_sm90_architectures MATCHES "90a")
    set(mica_sm90 1)
  endif()
  target_compile_definitions(mica PRIVATE MICA_WITH_SM90A=${mica_sm90})
  if(mica_sm90_sources)
    add_library(mica_sm90 OBJECT ${mica_sm90_sources})
    set_target_properties(mica_sm90 PROPERTIES CUDA_ARCHITECTURES "${mica_sm90_architectures}"
                                               POSITION_INDEPENDENT_CODE ON)
    foreach(property INCLUDE_DIRECTORIES COMPILE_DEFINITIONS COMPILE_OPTIONS)
      set_property(TARGET mica_sm90 PROPERTY ${property} $<TARGET_PROPERTY:mica,${property}>)
    endforeach()
    target_sources(mica PRIVATE $<TARGET_OBJECTS:mica_sm90>)
  endif()
endif()

# The shared library is named after the version that its interface belongs to, since minor versions change it, and exports
# only the interface. Tests and benchmarks also call internals.
set_target_properties(mica PROPERTIES VERSION ${PROJECT_VERSION}
                                      SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
get_target_property(mica_type mica TYPE)
if(mica_type STREQUAL "SHARED_LIBRARY" AND CMAKE_EXECUTABLE_FORMAT STREQUAL "ELF" AND
   NOT MICA_TESTS AND NOT MICA_BENCHMARKS AND NOT MICA_FUZZ)
  set(mica_exports "${PROJECT_BINARY_DIR}/exports")
  file(GENERATE OUTPUT "${mica_exports}/objects" CONTENT "$<JOIN:$<TARGET_OBJECTS:mica>,\n>\n")
  set(mica_interface "${MICA_GENERATED_INCLUDE}/mica/mica.h")
  if(MICA_WITH_CUDA)
    file(GLOB mica_cuda_headers "${PROJECT_SOURCE_DIR}/core/cuda/*.h" "${PROJECT_SOURCE_DIR}/core/cuda/*.cuh")
    list(APPEND mica_interface ${mica_cuda_headers})
  endif()
  add_custom_command(TARGET mica PRE_LINK VERBATIM
    COMMAND awk -v "nm=${CMAKE_NM}" -v "objects=${mica_exports}/objects" -v "include=${PROJECT_BINARY_DIR}/include"
            -v version=mica_${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR} -v "output=${mica_exports}/map"
            -f "${PROJECT_SOURCE_DIR}/cmake/exports.awk" ${mica_interface})
  target_link_options(mica PRIVATE "LINKER:--version-script=${mica_exports}/map")
endif()
