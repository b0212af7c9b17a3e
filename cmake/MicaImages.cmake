# Decides which libraries read image files and .gz files: sets MICA_WITH_PNG, MICA_WITH_JPEG and MICA_WITH_ZLIB to 1 or 0.
# Without one, its files are an error that names the package.

# mica_find_reader(NAME PACKAGE TARGET DEBIAN): whether to use TARGET, which find_package(PACKAGE) provides.
macro(mica_find_reader name package target debian)
  if(NOT MICA_${name} MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "MICA_${name}: expected AUTO, ON or OFF, got ${MICA_${name}}")
  endif()
  set(MICA_WITH_${name} 0)
  if(NOT MICA_${name} STREQUAL "OFF")
    find_package(${package} QUIET)
    if(TARGET ${target})
      set(MICA_WITH_${name} 1)
      list(APPEND mica_reader_libraries ${target})
    elseif(MICA_${name} STREQUAL "ON")
      message(FATAL_ERROR "MICA_${name} is ON, but ${package} was not found. Debian: ${debian}")
    endif()
  endif()
  message(STATUS "mica: ${package} ${MICA_WITH_${name}} (MICA_${name}=${MICA_${name}})")
endmacro()

set(mica_reader_libraries "")
mica_find_reader(PNG PNG PNG::PNG libpng-dev)
mica_find_reader(JPEG JPEG JPEG::JPEG libjpeg-dev)
mica_find_reader(ZLIB ZLIB ZLIB::ZLIB zlib1g-dev)

# jpeg_skip_scanlines and jpeg_crop_scanline are libjpeg-turbo's.
if(MICA_WITH_JPEG)
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_LIBRARIES JPEG::JPEG)
  check_cxx_source_compiles("#include <cstdio>
    #include <jpeglib.h>
    int main() { return jpeg_skip_scanlines(nullptr, 1); }" MICA_JPEG_IS_TURBO)
  unset(CMAKE_REQUIRED_LIBRARIES)
  if(NOT MICA_JPEG_IS_TURBO)
    if(MICA_JPEG STREQUAL "ON")
      message(FATAL_ERROR "MICA_JPEG is ON, but ${JPEG_LIBRARIES} is not libjpeg-turbo. Debian: libjpeg-dev")
    endif()
    message(STATUS "mica: JPEG 0 (${JPEG_LIBRARIES} is not libjpeg-turbo)")
    set(MICA_WITH_JPEG 0)
    list(REMOVE_ITEM mica_reader_libraries JPEG::JPEG)
  endif()
endif()
