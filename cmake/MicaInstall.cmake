# cmake --install: the library, its headers in the layout of the source tree, and the files for find_package(mica).

include(CMakePackageConfigHelpers)

set(mica_cmake_dir "${CMAKE_INSTALL_LIBDIR}/cmake/mica")
install(TARGETS mica EXPORT mica-targets)
install(DIRECTORY ${mica_folders} DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/mica"
        FILES_MATCHING PATTERN "*.h" PATTERN "*.cuh")
install(FILES "${MICA_GENERATED_INCLUDE}/mica/mica.h" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/mica")

configure_package_config_file(cmake/mica-config.cmake.in "${PROJECT_BINARY_DIR}/mica-config.cmake"
                              INSTALL_DESTINATION "${mica_cmake_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/mica-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/mica-config.cmake" "${PROJECT_BINARY_DIR}/mica-config-version.cmake"
        DESTINATION "${mica_cmake_dir}")
install(EXPORT mica-targets NAMESPACE mica:: DESTINATION "${mica_cmake_dir}")
