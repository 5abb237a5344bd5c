# SPDX-License-Identifier: MIT
# Everything CTest runs beside the cmocka programs that CMakeLists.txt finds by convention: the test
# tools and benchmarks that need a target of their own, end-to-end tests over real processes,
# comparisons with references, models of the protocol, sanitizer builds, fuzzing and style.
#
# Exit code 77 of a script means "skipped", with the reason on its last line.

# --- programs that are no tests by themselves ------------------------------------------------------
function(xpool_tool name source)
  if(NOT EXISTS ${CMAKE_SOURCE_DIR}/${source})
    return()
  endif()
  foreach(library ${ARGN})
    if(NOT TARGET ${library})
      return()
    endif()
  endforeach()
  add_executable(${name} ${source})
  target_link_libraries(${name} PRIVATE ${ARGN})
  target_compile_definitions(${name} PRIVATE XPOOL_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
endfunction()
xpool_tool(engine_forward tests/tools/engine_forward.c xpool_engine xpool_ffn)
xpool_tool(bench_hop benches/bench_hop.c xpool_fabric)
xpool_tool(bench_kernels benches/bench_kernels.c xpool_kernels)
xpool_tool(bench_kv benches/bench_kv.c xpool_engine xpool_kv)
xpool_tool(bench_shim benches/bench_shim.c xpool_library xpool_ffn)

include(${CMAKE_SOURCE_DIR}/tests/cuda/tests.cmake OPTIONAL)

# Both play MPS controllers, and each refuses those of others.
foreach(test unit/cuda/test_mps unit/control/test_plane)
  if(TEST ${test})
    set_tests_properties(${test} PROPERTIES RESOURCE_LOCK mps)
  endif()
endforeach()

# Loaded by its path, found by its name afterwards.
if(TARGET unit_ffn_test_cuda_library)
  add_library(fake_cublaslt SHARED ${CMAKE_SOURCE_DIR}/tests/unit/ffn/fake/cublaslt.c)
  set_target_properties(fake_cublaslt PROPERTIES OUTPUT_NAME cublasLt SOVERSION 13 LIBRARY_OUTPUT_DIRECTORY
                                                 ${CMAKE_BINARY_DIR}/tests/fake)
  target_compile_options(fake_cublaslt PRIVATE -fPIC -Wno-missing-prototypes)
  add_dependencies(unit_ffn_test_cuda_library fake_cublaslt)
endif()

# The sanitizer builds take the programs above and the cmocka tests; the rest belongs to the plain one.
if(XPOOL_SANITIZE OR XPOOL_FUZZ OR NOT TARGET xpool)
  return()
endif()

include(${CMAKE_SOURCE_DIR}/tests/emulated/emulated.cmake)

set(XPOOL_TEST_PYTHON ${CMAKE_SOURCE_DIR}/scripts/test-python)
set(XPOOL_TEST_ENVIRONMENT
    "XPOOL_BIN=$<TARGET_FILE:xpool>"
    "XPOOL_BUILD=${CMAKE_BINARY_DIR}"
    "PYTHONPATH=${CMAKE_SOURCE_DIR}/tests/reference:${CMAKE_SOURCE_DIR}/tests/e2e"
    "PYTHONDONTWRITEBYTECODE=1"
    "PYTHONUNBUFFERED=1")

# xpool_script_test(NAME labels timeout COMMAND...)
function(xpool_script_test name labels timeout)
  add_test(NAME ${name} COMMAND ${ARGN} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
  set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT ${timeout} SKIP_RETURN_CODE 77
                       ENVIRONMENT "${XPOOL_TEST_ENVIRONMENT}")
endfunction()

# --- style -----------------------------------------------------------------------------------------
xpool_script_test(style/layers style 60 scripts/check-layers)
xpool_script_test(style/files style 120 scripts/check-style)
xpool_script_test(style/symbols style 60 scripts/check-symbols $<TARGET_FILE:libxpool>)
xpool_script_test(style/links style 60 scripts/check-links ${CMAKE_BINARY_DIR})
xpool_script_test(style/generated-docs style 60 $<TARGET_FILE:xpool> config docs --check .)
xpool_script_test(style/benchmark-pages style 60 scripts/render-results --check)

# --- end to end: tests/e2e/test_*.py, each over a system of real processes --------------------------
# They measure how fast things end, so each has the machine for itself.
file(GLOB e2e_tests CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/e2e/test_*.py)
foreach(test ${e2e_tests})
  get_filename_component(name ${test} NAME_WE)
  string(REGEX REPLACE "^test_" "" name ${name})
  xpool_script_test(e2e/${name} e2e 600 ${XPOOL_TEST_PYTHON} --system ${test})
  set_tests_properties(e2e/${name} PROPERTIES RUN_SERIAL TRUE)
endforeach()

# --- comparisons with references: Python programs of the environment made by scripts/test-venv ------
# xpool_reference_test(NAME FILE TIMEOUT ARGUMENT...): registered when the file exists.
function(xpool_reference_test name file timeout)
  if(EXISTS ${CMAKE_SOURCE_DIR}/tests/reference/${file})
    xpool_script_test(reference/${name} reference ${timeout}
                      ${XPOOL_TEST_PYTHON} --venv tests/reference/${file} ${ARGN})
  endif()
endfunction()
xpool_reference_test(tokenizers text_tokenizers.py 900 $<TARGET_FILE:xpool>
                     --gguf .xpool-cache/models/SmolLM2-135M-Instruct.Q4_1.gguf)
xpool_reference_test(templates text_templates.py 300 $<TARGET_FILE:xpool>
                     --gguf .xpool-cache/models/SmolLM2-135M-Instruct.Q4_1.gguf)
xpool_reference_test(model model_check.py 600)
# Checkpoints and values written by gguf and safetensors themselves, read by the C test of src/model.
if(TARGET unit_model_test_fixtures)
  file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/fixtures)
  xpool_reference_test(make-gguf make_gguf.py 300 ${CMAKE_BINARY_DIR}/fixtures)
  xpool_script_test(reference/checkpoints reference 300 $<TARGET_FILE:unit_model_test_fixtures>)
  set_tests_properties(reference/make-gguf PROPERTIES FIXTURES_SETUP gguf)
  set_tests_properties(reference/checkpoints PROPERTIES FIXTURES_REQUIRED gguf
                       ENVIRONMENT "XPOOL_TEST_FIXTURES=${CMAKE_BINARY_DIR}/fixtures")
endif()
if(TARGET engine_forward)
  xpool_reference_test(engine engine_hf.py 1200)
endif()
xpool_reference_test(library ffn_library.py 600)
set_tests_properties(reference/library PROPERTIES RUN_SERIAL TRUE)
xpool_script_test(reference/openai-client "e2e;reference" 300
                  ${XPOOL_TEST_PYTHON} --venv tests/e2e/openai_client.py)
xpool_script_test(e2e/kv-ranks e2e 300 ${XPOOL_TEST_PYTHON} --venv tests/e2e/kv_ranks.py)
set_tests_properties(e2e/kv-ranks PROPERTIES RUN_SERIAL TRUE)
set_tests_properties(reference/openai-client PROPERTIES RUN_SERIAL TRUE)
if(EXISTS ${CMAKE_SOURCE_DIR}/../shared/check/golden_serve.py)
  xpool_script_test(e2e/golden-serve e2e 400 ${XPOOL_TEST_PYTHON} --system
                    ../shared/check/golden_serve.py ../shared/data/tales/qwen3-moe)
  xpool_script_test(e2e/golden-text e2e 120 ${XPOOL_TEST_PYTHON} --system
                    ../shared/check/golden_text.py)
  set_tests_properties(e2e/golden-serve PROPERTIES RUN_SERIAL TRUE)
endif()

# --- SGLang on the CPU: a server a test, so each has the machine for itself --------------------------
# `sglang/vanilla` asks SGLang alone, once for a checkpoint and set of pins; others compare with that.
function(xpool_sglang_test name file timeout)
  xpool_script_test(sglang/${name} sglang ${timeout} ${XPOOL_TEST_PYTHON} --venv tests/sglang/${file}
                    ${ARGN})
  set_tests_properties(sglang/${name} PROPERTIES RUN_SERIAL TRUE)
endfunction()
xpool_sglang_test(plugin-units test_plugin_units.py 300)
xpool_sglang_test(bench-units test_bench_units.py 120)
xpool_sglang_test(kv-bench-units test_kv_bench_units.py 120)
xpool_sglang_test(graph-units test_graph_units.py 300)
xpool_sglang_test(kv test_kv.py 300)
if(TARGET fake_cuda)
  xpool_sglang_test(kv-device ../cuda/kv_torch.py 300 --rehearse --build ${CMAKE_BINARY_DIR}
                    --out ${CMAKE_BINARY_DIR}/tests)
endif()
xpool_sglang_test(plugin-refusals test_plugin_refusals.py 900)
xpool_sglang_test(vanilla vanilla.py 1200)
set_tests_properties(sglang/vanilla PROPERTIES FIXTURES_SETUP sglang_vanilla)
xpool_sglang_test(checkpoints test_checkpoints.py 600)
set_tests_properties(sglang/checkpoints PROPERTIES FIXTURES_REQUIRED sglang_vanilla)
# The same under CrossPool, a family a test; then two ranks, deaths, three Instances, and what is refused.
set(families llama qwen2 qwen3 qwen3-moe deepseek-v2 glm4-moe-lite)
foreach(family ${families})
  xpool_sglang_test(family-${family} family.py 420 ${family})
  set_tests_properties(sglang/family-${family} PROPERTIES FIXTURES_REQUIRED sglang_vanilla)
endforeach()
xpool_sglang_test(tensor-parallel test_parallel.py 600 tensor_parallel)
xpool_sglang_test(data-parallel test_parallel.py 600 data_parallel)
xpool_sglang_test(kill test_kill.py 900)
xpool_sglang_test(mixed test_mixed.py 420)
xpool_sglang_test(borrow test_borrow.py 420)
if(EXISTS ${CMAKE_SOURCE_DIR}/tests/sglang/test_quickstart.py)
  xpool_sglang_test(quickstart test_quickstart.py 600)
endif()
if(EXISTS ${CMAKE_SOURCE_DIR}/../shared/check/golden_serve.py)
  foreach(model qwen3-moe deepseek-v2 glm4-moe-lite)
    xpool_script_test(sglang/golden-${model} sglang 420 ${XPOOL_TEST_PYTHON} --venv
                      ../shared/check/golden_serve.py --engine sglang ../shared/data/tales/${model})
    set_tests_properties(sglang/golden-${model} PROPERTIES RUN_SERIAL TRUE)
  endforeach()
endif()

xpool_script_test(cuda/roles cuda 180 ${XPOOL_TEST_PYTHON} --venv tests/cuda/roles.py
                  --build ${CMAKE_BINARY_DIR})
set_tests_properties(cuda/roles PROPERTIES RUN_SERIAL TRUE)
xpool_script_test(cuda/open-requests cuda 240 ${XPOOL_TEST_PYTHON} --venv tests/cuda/open_requests.py
                  --build ${CMAKE_BINARY_DIR})
set_tests_properties(cuda/open-requests PROPERTIES RUN_SERIAL TRUE)
# Whole models on two AtnAgents and two FfnAgents, each Instance of two ranks: the script for GPUs, on processors.
xpool_script_test(cuda/two-gpu-rehearsal "cuda;reference" 300 ${XPOOL_TEST_PYTHON} --venv tests/cuda/two_gpu.py
                  --build ${CMAKE_BINARY_DIR} --rehearse --scene ranks --models qwen3)
set_tests_properties(cuda/two-gpu-rehearsal PROPERTIES RUN_SERIAL TRUE)
# What is made of compute-sanitizer's word on the stage kernels: a script stands for the tool.
if(TARGET cuda_stage_sanitize)
  xpool_script_test(cuda/stage-sanitizer-rehearsal cuda 60 ${XPOOL_TEST_PYTHON} --system tests/cuda/sanitizer_rehearsal.py
                    --build ${CMAKE_BINARY_DIR})
endif()
# Endurance, in short form: on processors, where every row is checked, and over a libcuda without a GPU.
if(TARGET cuda_instance)
  set(soak ${CMAKE_SOURCE_DIR}/tests/cuda/soak_on_device --build ${CMAKE_BINARY_DIR} --seconds 1 --kills 16
      --agent-kills 3 --reform-kills 3 --settle 0.3)
  xpool_script_test(cuda/soak-cpu cuda 120 ${XPOOL_TEST_PYTHON} --system ${soak} --rehearse cpu
                    --out ${CMAKE_BINARY_DIR}/soak-cpu)
  xpool_script_test(cuda/soak-fake cuda 120 ${XPOOL_TEST_PYTHON} --system ${soak} --rehearse fake
                    --out ${CMAKE_BINARY_DIR}/soak-fake)
  # The Instances do see what is wrong.
  xpool_script_test(cuda/soak-wrong cuda 60 ${XPOOL_TEST_PYTHON} --system ${soak} --rehearse cpu --only soak
                    --out ${CMAKE_BINARY_DIR}/soak-wrong)
  set_property(TEST cuda/soak-wrong APPEND PROPERTY ENVIRONMENT "XPOOL_TEST_ZERO_FFN=1")
  set_tests_properties(cuda/soak-wrong PROPERTIES PASS_REGULAR_EXPRESSION "qwen3-moe: [0-9]+ wrong: wrong: ")
  set_tests_properties(cuda/soak-cpu cuda/soak-fake cuda/soak-wrong PROPERTIES RUN_SERIAL TRUE)
endif()

# The demo itself, as a user runs it the second time.
xpool_script_test(e2e/demo "e2e;reference" 300 scripts/demo)
set_tests_properties(e2e/demo PROPERTIES RUN_SERIAL TRUE)

# --- models of the protocol, data races ------------------------------------------------------------
if(EXISTS ${CMAKE_SOURCE_DIR}/verify/run.sh)
  xpool_script_test(verify/spin verify 600 sh verify/run.sh)
endif()
if(EXISTS ${CMAKE_SOURCE_DIR}/tests/tsan/run.sh)
  xpool_script_test(sanitize/tsan "sanitize" 600 sh tests/tsan/run.sh)
endif()

# --- AddressSanitizer and UndefinedBehaviorSanitizer: every C test again, and a short serving run ---
xpool_script_test(sanitize/build sanitize 1500 scripts/build-asan)
xpool_script_test(sanitize/tests sanitize 1200 scripts/build-asan --test)
xpool_script_test(sanitize/serving sanitize 600
                  ${XPOOL_TEST_PYTHON} --system tests/e2e/test_golden.py --short)
set_tests_properties(sanitize/build PROPERTIES FIXTURES_SETUP asan RUN_SERIAL TRUE)
set_tests_properties(sanitize/tests sanitize/serving PROPERTIES FIXTURES_REQUIRED asan RUN_SERIAL TRUE)
set_property(TEST sanitize/serving PROPERTY ENVIRONMENT "${XPOOL_TEST_ENVIRONMENT}"
             "XPOOL_BIN=${CMAKE_SOURCE_DIR}/build-asan/bin/xpool" "XPOOL_SLOW=10")

# --- fuzzing: 15 s a target ------------------------------------------------------------------------
file(GLOB fuzz_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/fuzz/fuzz_*.c)
if(fuzz_sources)
  xpool_script_test(fuzz/build fuzz 1200 scripts/fuzz --build-only)
  set_tests_properties(fuzz/build PROPERTIES FIXTURES_SETUP fuzz RUN_SERIAL TRUE)
  foreach(source ${fuzz_sources})
    get_filename_component(name ${source} NAME_WE)
    string(REGEX REPLACE "^fuzz_" "" name ${name})
    xpool_script_test(fuzz/${name} fuzz 120 scripts/fuzz --no-build --seconds 15 --seed 1 --runs 100000
                      ${name})
    set_tests_properties(fuzz/${name} PROPERTIES FIXTURES_REQUIRED fuzz)
  endforeach()
endif()

# --- CUDA: the protocol headers are one source for C and CUDA; compiled and linked where nvcc is -------
find_program(XPOOL_NVCC nvcc HINTS /usr/local/cuda/bin)
if(XPOOL_NVCC)
  xpool_script_test(cuda/protocol-compiles cuda 300 ${XPOOL_NVCC} -arch=sm_90a -std=c++17
                    -I${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/tests/cuda/protocol_compiles.cu
                    -o ${CMAKE_BINARY_DIR}/protocol_compiles)
endif()
