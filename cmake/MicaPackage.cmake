# cpack -G DEB: libmica0.2 (the shared library), libmica-dev and mica-tools. packaging/deb builds all that they need.

set(MICA_HWCAPS "" CACHE STRING
    "Libraries for newer CPUs, for packages: x86-64-v3=<path of libmica.so.*>;x86-64-v4=<path>")
mark_as_advanced(MICA_HWCAPS)

set(mica_soversion ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
set(mica_library_package libmica${mica_soversion})
set(mica_development_package libmica-dev)
set(mica_tools_package mica-tools)
foreach(component library development tools)
  install(FILES LICENSE DESTINATION share/doc/${mica_${component}_package} RENAME copyright COMPONENT ${component}
          EXCLUDE_FROM_ALL)
endforeach()
# The dynamic linker takes a library from the subfolder for the newest kind of CPU that it runs on.
foreach(entry ${MICA_HWCAPS})
  string(REGEX MATCH "^([^=]+)=(.+)$" entry "${entry}")
  install(FILES "${CMAKE_MATCH_2}" DESTINATION "${CMAKE_INSTALL_LIBDIR}/glibc-hwcaps/${CMAKE_MATCH_1}"
          RENAME libmica.so.${mica_soversion} COMPONENT library EXCLUDE_FROM_ALL)
endforeach()

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME mica)
set(CPACK_PACKAGE_VENDOR mica)
set(CPACK_PACKAGE_CONTACT "mica" CACHE STRING "Name and address of the maintainer, for packages")
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_COMPONENTS_ALL library development)
if(MICA_EXAMPLES)
  list(APPEND CPACK_COMPONENTS_ALL tools)
endif()
set(CPACK_STRIP_FILES ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
set(mica_is_exactly "${mica_library_package} (= ${PROJECT_VERSION})")

set(CPACK_DEBIAN_LIBRARY_PACKAGE_NAME ${mica_library_package})
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SHLIBDEPS ON)
set(CPACK_COMPONENT_LIBRARY_DESCRIPTION "Tensors, autograd and fused kernels: shared library")

set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME ${mica_development_package})
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "${mica_is_exactly}, libfmt-dev")
set(CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION "Tensors, autograd and fused kernels: headers, for CMake and pkg-config")

# dpkg-shlibdeps finds what libmica itself needs; the programs add nothing to that.
set(CPACK_DEBIAN_TOOLS_PACKAGE_NAME ${mica_tools_package})
set(CPACK_DEBIAN_TOOLS_PACKAGE_SECTION science)
set(CPACK_DEBIAN_TOOLS_PACKAGE_DEPENDS "${mica_is_exactly}")
set(CPACK_COMPONENT_TOOLS_DESCRIPTION "Tensors, autograd and fused kernels: train, generate, embed and fine-tune")
include(CPack)
