# headrace_ranks_test: a test on several ranks, where MPI was found. Debian: libmpich-dev mpich (Open MPI 4 may crash as
# it ends, about once in a thousand runs).
set(MPI_CXX_SKIP_MPICXX ON)
find_package(MPI COMPONENTS CXX)

# A job that hangs is ended by mpiexec with all its ranks. Open MPI: as root, with more ranks than cores, none of which
# is bound or spins, without a system call that containers forbid; its release 5 reads PRTE_.
set(ranks_environment
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
    OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_mpi_yield_when_idle=1
    OMPI_MCA_btl_vader_single_copy_mechanism=none PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
    PRTE_MCA_hwloc_default_binding_policy=none MPIEXEC_TIMEOUT=60 OMP_NUM_THREADS=1)

# headrace_ranks_test(name ranks target argument...). Each has a folder for temporary files of its own: jobs of Open MPI
# that start and end at the same time trip over a common one.
function(headrace_ranks_test name ranks target)
    set(folder ${PROJECT_BINARY_DIR}/ranks/${name})
    file(MAKE_DIRECTORY ${folder})
    add_test(NAME ${name}
             COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks} $<TARGET_FILE:${target}> ${ARGN})
    set_tests_properties(${name} PROPERTIES TIMEOUT 90 ENVIRONMENT "${ranks_environment};TMPDIR=${folder}")
endfunction()
