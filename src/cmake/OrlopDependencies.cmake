# Looks for everything outside the project. Nothing is downloaded.

find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(PkgConfig REQUIRED)
pkg_check_modules(hwloc REQUIRED IMPORTED_TARGET hwloc)
# Debian ships these headers without a CMake package everywhere, so they are found by name.
find_path(ORLOP_XXHASH_INCLUDE xxhash.h REQUIRED)

# orlop_find(PART condition): sets ORLOP_HAVE_PART and stops when ORLOP_PART=ON is not met.
macro(orlop_conclude part found)
  set(ORLOP_HAVE_${part} OFF)
  if(NOT ORLOP_${part} STREQUAL "OFF" AND ${found})
    set(ORLOP_HAVE_${part} ON)
  elseif(ORLOP_${part} STREQUAL "ON")
    message(FATAL_ERROR "ORLOP_${part}=ON, but it was not found on this machine")
  endif()
endmacro()

# By name: Debian's CMake package of oneDNN insists on OpenCL, which Orlop does not use.
set(orlop_onednn_found OFF)
if(NOT ORLOP_ONEDNN STREQUAL "OFF")
  find_path(ORLOP_ONEDNN_INCLUDE dnnl.hpp)
  find_library(ORLOP_ONEDNN_LIBRARY dnnl)
  if(ORLOP_ONEDNN_INCLUDE AND ORLOP_ONEDNN_LIBRARY)
    set(orlop_onednn_found ON)
    add_library(orlop_onednn INTERFACE)
    target_include_directories(orlop_onednn SYSTEM INTERFACE ${ORLOP_ONEDNN_INCLUDE})
    target_link_libraries(orlop_onednn INTERFACE ${ORLOP_ONEDNN_LIBRARY})
  endif()
endif()
orlop_conclude(ONEDNN orlop_onednn_found)

if(NOT ORLOP_URING STREQUAL "OFF")
  pkg_check_modules(liburing QUIET IMPORTED_TARGET liburing>=2.3)
endif()
orlop_conclude(URING liburing_FOUND)

if(NOT ORLOP_MPI STREQUAL "OFF")
  find_package(MPI QUIET COMPONENTS CXX)
endif()
orlop_conclude(MPI MPI_CXX_FOUND)

set(orlop_cuda_found OFF)
if(NOT ORLOP_CUDA STREQUAL "OFF" AND NOT ORLOP_SANITIZE)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    # CMake 3.25 does not know the C++20 flag of this nvcc.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    find_package(CUDAToolkit REQUIRED)
    set(orlop_cuda_found ON)
  endif()
endif()
orlop_conclude(CUDA orlop_cuda_found)

set(orlop_nccl_found OFF)
if(ORLOP_HAVE_CUDA)
  find_path(ORLOP_NCCL_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_library(ORLOP_NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR})
  if(ORLOP_NCCL_INCLUDE AND ORLOP_NCCL_LIBRARY)
    set(orlop_nccl_found ON)
  endif()
endif()
orlop_conclude(NCCL orlop_nccl_found)

set(orlop_python_found OFF)
if(NOT ORLOP_PYTHON STREQUAL "OFF" AND NOT ORLOP_SANITIZE)
  find_package(Python QUIET COMPONENTS Interpreter Development.Module)
  if(Python_FOUND)
    execute_process(COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir
                    OUTPUT_VARIABLE orlop_pybind11_dir OUTPUT_STRIP_TRAILING_WHITESPACE
                    ERROR_QUIET)
    find_package(pybind11 QUIET HINTS ${orlop_pybind11_dir})
    set(orlop_python_found ${pybind11_FOUND})
  endif()
endif()
orlop_conclude(PYTHON orlop_python_found)

if(ORLOP_TESTS)
  find_package(GTest REQUIRED)
endif()
if(ORLOP_BENCH)
  find_package(benchmark REQUIRED)
endif()

function(orlop_print_summary)
  message(STATUS "orlop ${PROJECT_VERSION}: CUDA ${ORLOP_HAVE_CUDA}, NCCL ${ORLOP_HAVE_NCCL}, "
          "MPI ${ORLOP_HAVE_MPI}, io_uring ${ORLOP_HAVE_URING}, oneDNN ${ORLOP_HAVE_ONEDNN}, "
          "Python ${ORLOP_HAVE_PYTHON}")
endfunction()
