# Units of Horovod's library for torch: horovod/torch/CMakeLists.txt includes this file before it adds the library.
#
# As released, each of 70 files parses the same large headers at -O3 with debug information. Here they become few units,
# in one target, the longest first, so that two compilers are busy from beginning to end. What sums tensors keeps -O3.
# Binding and control keep -O2: at -O1 a hundred small all-reduces took a tenth more CPU time.
# Files that a unit does not name (MPI's, CUDA's) are compiled as they are.

string(REPLACE "-Wall" "-w" CMAKE_CXX_FLAGS "${CMAKE_CXX_FLAGS}")
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -DNDEBUG")
set(UNITS "")

# Set UNITS to begin with a file that includes the files named after `options`, as far as they belong to this build.
macro(add_unit name options folder)
    set(UNIT_TEXT "")
    foreach(FILE ${ARGN})
        set(FILE "${folder}/${FILE}.cc")
        if("${FILE}" IN_LIST SOURCES OR "${FILE}" IN_LIST PYTORCH_SOURCES)
            string(APPEND UNIT_TEXT "#include \"${FILE}\"\n")
            list(REMOVE_ITEM SOURCES "${FILE}")
            list(REMOVE_ITEM PYTORCH_SOURCES "${FILE}")
        endif()
    endforeach()
    if(UNIT_TEXT)
        set(UNIT_FILE "${CMAKE_CURRENT_BINARY_DIR}/units/${name}.cc")
        file(WRITE "${UNIT_FILE}" "${UNIT_TEXT}")
        set_source_files_properties("${UNIT_FILE}" PROPERTIES COMPILE_FLAGS "${options}")
        list(APPEND UNITS "${UNIT_FILE}")
    endif()
endmacro()

set(HOROVOD_FOLDER "${PROJECT_SOURCE_DIR}/horovod/common")

# torch's headers for tensors and pybind11 alone, without those for modules, optimizers and data
include_directories(BEFORE "${PROJECT_SOURCE_DIR}/unipar_headers")
add_unit(torch "-O2" "${PROJECT_SOURCE_DIR}/horovod/torch"
    mpi_ops_v2 adapter_v2 handle_manager ready_event cuda_util)

# gloo's reductions are instantiated here; all this was written for C++14, whose headers are smaller
add_unit(kernels "-O3 ${UNIT_STANDARD}" "${HOROVOD_FOLDER}" ops/gloo_operations half ops/collective_operations)

# What Horovod calls of gloo; as a library of its own it would be finished before another unit is begun
if(HAVE_GLOO AND Pytorch_CXX11)
    get_target_property(GLOO_FILES gloo SOURCES)
    list(REMOVE_DUPLICATES GLOO_FILES)
    list(APPEND SOURCES ${GLOO_FILES})
    set(GLOO_FOLDER "${PROJECT_SOURCE_DIR}/third_party/gloo/gloo")
    add_unit(gloo "-O2 ${UNIT_STANDARD}" "${GLOO_FOLDER}"
        algorithm allgather allgatherv alltoall alltoallv barrier broadcast context gather gatherv types
        common/logging common/linux mpi/context
        rendezvous/context rendezvous/file_store rendezvous/prefix_store rendezvous/store
        transport/address transport/buffer transport/context transport/device transport/pair transport/unbound_buffer
        transport/tcp/address transport/tcp/buffer transport/tcp/context transport/tcp/device transport/tcp/error
        transport/tcp/loop transport/tcp/pair transport/tcp/socket transport/tcp/unbound_buffer
        allreduce)  # last: it has a ReductionFunction of its own
    foreach(FILE allreduce_local reduce scatter rendezvous/hash_store)
        list(REMOVE_ITEM SOURCES "${GLOO_FOLDER}/${FILE}.cc")
    endforeach()
    list(REMOVE_ITEM PYTORCH_LINKER_LIBS gloo)
    include_directories("${PROJECT_BINARY_DIR}/third_party/gloo")
    set_target_properties(gloo PROPERTIES EXCLUDE_FROM_ALL TRUE)
endif()

add_unit(common "-O2 ${UNIT_STANDARD}" "${HOROVOD_FOLDER}"
    controller operations message response_cache timeline common fusion_buffer_manager group_table logging
    stall_inspector thread_pool tensor_queue process_set ops/operation_manager utils/env_parser
    gloo/gloo_controller gloo/gloo_context gloo/http_store gloo/memory_store)

# A search for good settings, under HOROVOD_AUTOTUNE only. Last: of functions in several units the linker takes the first
add_unit(tuning "-O0 ${UNIT_STANDARD}" "${HOROVOD_FOLDER}"
    parameter_manager optim/bayesian_optimization optim/gaussian_process)

set(SOURCES ${UNITS} ${SOURCES})
