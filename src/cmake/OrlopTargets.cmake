# Requirements that every target of the project shares, and one function per kind of target.

add_library(orlop_requirements INTERFACE)
target_compile_features(orlop_requirements INTERFACE cxx_std_20)
target_compile_options(orlop_requirements INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Werror -Wconversion -ffp-contract=off
                            -fvisibility=hidden -fvisibility-inlines-hidden>)
target_include_directories(orlop_requirements INTERFACE
  ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR})
# Some compilers link their own copy of the C++ runtime into every library. Exported, parts of it
# would take the place of the process's own: cuDNN then crashes in std::call_once.
target_link_options(orlop_requirements INTERFACE
  LINKER:--exclude-libs,libstdc++.a:libgcc.a:libgcc_eh.a)
if(ORLOP_SANITIZE)
  # Checks inside a loop keep clang from vectorising it, of which it would warn.
  target_compile_options(orlop_requirements INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${ORLOP_SANITIZE} -fno-omit-frame-pointer>
    $<$<CXX_COMPILER_ID:Clang>:-Wno-pass-failed>)
  target_link_options(orlop_requirements INTERFACE -fsanitize=${ORLOP_SANITIZE})
endif()

# One static library per folder, named after it. PRECOMPILE: it has enough files for a precompiled header to pay;
# not where the wheel takes its objects from the compiler cache, which finds none behind another tree's header.
function(orlop_library name)
  cmake_parse_arguments(arg "PRECOMPILE" "" "SOURCES;DEPENDS;PRIVATE_DEPENDS" ${ARGN})
  add_library(${name} STATIC ${arg_SOURCES})
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_link_libraries(${name} PUBLIC orlop_requirements ${arg_DEPENDS}
                        PRIVATE ${arg_PRIVATE_DEPENDS})
  if(arg_PRECOMPILE AND ORLOP_PRECOMPILE AND ORLOP_SANITIZE)
    target_precompile_headers(${name} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${PROJECT_SOURCE_DIR}/src/base/prelude.h>")
  endif()
endfunction()

# Marks a target that computes. Sanitized builds optimise nothing else: compiling is the larger part of
# their time, and what is optimised away is not checked.
function(orlop_computes name)
  if(ORLOP_SANITIZE)
    target_compile_options(${name} PRIVATE -O1)
  endif()
endfunction()

# Marks a target that only tests or binds: what it calls is optimised as ever, itself little.
function(orlop_compile_cheaply name)
  if(NOT ORLOP_SANITIZE AND CMAKE_BUILD_TYPE STREQUAL RelWithDebInfo AND ORLOP_PRECOMPILE)
    target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O1>)
  endif()
endfunction()

# A GoogleTest executable that ctest runs as one test. LABELS: unit, integration, gpu, large, ...: large ones
# need more memory than sanitizers leave, so that sanitized builds do without them.
function(orlop_test name)
  cmake_parse_arguments(arg "" "TIMEOUT" "SOURCES;DEPENDS;LABELS" ${ARGN})
  if(ORLOP_SANITIZE AND "large" IN_LIST arg_LABELS)
    return()
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE orlop_requirements ${arg_DEPENDS} GTest::gmock
                        GTest::gtest_main)
  orlop_compile_cheaply(${name})
  # What is precompiled without OpenMP serves no file with it.
  if(TARGET orlop_test_prelude AND NOT "OpenMP::OpenMP_CXX" IN_LIST arg_DEPENDS)
    target_precompile_headers(${name} REUSE_FROM orlop_test_prelude)
    target_link_libraries(${name} PRIVATE fmt::fmt)
  endif()
  add_test(NAME ${name} COMMAND ${name})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  if(ORLOP_SANITIZE)
    math(EXPR arg_TIMEOUT "4 * ${arg_TIMEOUT}")
  endif()
  # Teams wait without spinning: with more threads than cores, spinning starves whoever is waited for.
  set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT}
    ENVIRONMENT_MODIFICATION OMP_WAIT_POLICY=set:passive)
endfunction()

# A measuring program; not run by ctest.
function(orlop_bench name)
  cmake_parse_arguments(arg "" "" "SOURCES;DEPENDS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE orlop_requirements ${arg_DEPENDS})
endfunction()

# mpirun refuses root unless it is told twice.
set(ORLOP_MPI_TEST_ENVIRONMENT OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    OMP_WAIT_POLICY=passive)

# A test that mpirun starts with so many ranks, on this machine alone and however few cores it has.
function(orlop_mpi_test name)
  cmake_parse_arguments(arg "" "RANKS;TIMEOUT" "COMMAND;LABELS" ${ARGN})
  list(POP_FRONT arg_COMMAND program)
  add_test(NAME ${name}
           COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${arg_RANKS} --oversubscribe
                   --mca btl self,vader --mca btl_vader_single_copy_mechanism none
                   $<TARGET_FILE:${program}> ${arg_COMMAND})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "integration;${arg_LABELS}" TIMEOUT ${arg_TIMEOUT}
    ENVIRONMENT "${ORLOP_MPI_TEST_ENVIRONMENT}")
endfunction()
