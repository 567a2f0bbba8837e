# Installs the library, its headers, the CMake package and the pkg-config file.
include(CMakePackageConfigHelpers)

install(TARGETS headrace EXPORT headraceTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/headrace DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT headraceTargets NAMESPACE headrace:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/headrace)

set(HEADRACE_ARCHIVE_WITH_CUDA OFF)
get_target_property(kind headrace TYPE)
if(headrace_cuda AND kind STREQUAL "STATIC_LIBRARY")
    set(HEADRACE_ARCHIVE_WITH_CUDA ON)
endif()
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/headraceConfig.cmake.in headraceConfig.cmake
        INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/headrace)
write_basic_package_version_file(headraceConfigVersion.cmake COMPATIBILITY SameMinorVersion)

# What a program that links the static library must add: the C++, OpenMP and CUDA run-times, as -l words for pkg-config.
set(HEADRACE_PRIVATE_LIBS "${OpenMP_CXX_FLAGS}")
foreach(library IN LISTS CMAKE_CXX_IMPLICIT_LINK_LIBRARIES)
    if(library MATCHES "^(stdc\\+\\+|c\\+\\+|m)$")
        string(APPEND HEADRACE_PRIVATE_LIBS " -l${library}")
    endif()
endforeach()
if(headrace_cuda)
    get_target_property(cudart ${HEADRACE_CUDART} IMPORTED_LOCATION)
    get_filename_component(folder "${cudart}" DIRECTORY)
    string(REPLACE "CUDA::" "-L${folder} -l" words "${HEADRACE_CUDART}")
    string(APPEND HEADRACE_PRIVATE_LIBS " ${words} -ldl -lrt -lpthread")
endif()
# Relative, so that an installed tree may be moved.
file(RELATIVE_PATH HEADRACE_PREFIX_FROM_PC ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(${PROJECT_SOURCE_DIR}/cmake/headrace.pc.in headrace.pc @ONLY)

install(FILES ${CMAKE_CURRENT_BINARY_DIR}/headraceConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/headraceConfigVersion.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/headrace)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/headrace.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
