# What `cmake --install` and a wheel get. Called when every target is defined:
#   orlop_install(TARGET orlop MODULES orlop_cuda orlop_cuda_optimizer orlop_mpi)    modules that do not exist are left out
# A consumer writes find_package(orlop) and links orlop::orlop.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# The libraries beside each other: in lib/ of a prefix, and in the package folder of a wheel, where the
# module and the libraries that are loaded at run time find them by $ORIGIN.
function(orlop_install_library target)
  set_property(TARGET ${target} APPEND PROPERTY INSTALL_RPATH "$ORIGIN")
  install(TARGETS ${target} LIBRARY DESTINATION orlop COMPONENT python NAMELINK_SKIP
          EXCLUDE_FROM_ALL)
endfunction()

# The runtime of OpenMP under the name that the libraries ask for, beside them: a process has one of that name.
function(orlop_install_openmp)
  if(NOT OpenMP_gomp_LIBRARY)
    message(FATAL_ERROR "ORLOP_CARRY_OPENMP=ON, but ${CMAKE_CXX_COMPILER} does not use GCC's OpenMP; build with g++")
  endif()
  file(REAL_PATH ${OpenMP_gomp_LIBRARY} library)
  install(FILES ${library} DESTINATION orlop COMPONENT python RENAME libgomp.so.1 EXCLUDE_FROM_ALL)
endfunction()

function(orlop_install)
  cmake_parse_arguments(arg "" "TARGET" "MODULES" ${ARGN})
  set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/orlop)

  # What a consumer of the target inherits, from the build tree as well.
  target_include_directories(${arg_TARGET} INTERFACE
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(${arg_TARGET} INTERFACE cxx_std_20)
  set_target_properties(${arg_TARGET} PROPERTIES SOVERSION ${PROJECT_VERSION_MAJOR})

  # A wheel keeps no symbolic links: one file, named as the loader asks for it.
  if(SKBUILD)
    set_target_properties(${arg_TARGET} PROPERTIES VERSION ${PROJECT_VERSION_MAJOR})
  endif()
  orlop_install_library(${arg_TARGET})
  install(TARGETS ${arg_TARGET} EXPORT orlop-targets)
  foreach(module ${arg_MODULES})
    if(TARGET ${module})
      orlop_install_library(${module})
      install(TARGETS ${module} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
    endif()
  endforeach()

  if(ORLOP_CARRY_OPENMP)
    orlop_install_openmp()
  endif()

  # Everything that a wheel holds.
  add_custom_target(orlop_wheel)
  foreach(part ${arg_TARGET} ${arg_MODULES} orlop_python)
    if(TARGET ${part})
      add_dependencies(orlop_wheel ${part})
    endif()
  endforeach()

  install(EXPORT orlop-targets NAMESPACE orlop:: DESTINATION ${config_dir})
  file(WRITE ${PROJECT_BINARY_DIR}/orlop-config.cmake
       "include(\"\${CMAKE_CURRENT_LIST_DIR}/orlop-targets.cmake\")\n")
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/orlop-config-version.cmake
    COMPATIBILITY SameMinorVersion)
  install(FILES ${PROJECT_BINARY_DIR}/orlop-config.cmake
                ${PROJECT_BINARY_DIR}/orlop-config-version.cmake
          DESTINATION ${config_dir})
endfunction()
