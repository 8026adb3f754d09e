# What the jobs here share, for nodes with one GH200 and one InfiniBand adapter each: settings of NCCL and XLA, and the run.
# Sourced by the .sbatch files, which set CODE, PYTHON, DATA, OUT and CONFIG.

# Network interfaces for NCCL's own messages, by prefix; ^ leaves out. A name such as =ib0 where a node has several networks.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-^lo,docker,virbr}
# InfiniBand adapters for the data, by prefix; =mlx5_0:1 takes one port of one adapter where others lead to storage.
export NCCL_IB_HCA=${NCCL_IB_HCA:-mlx5}
# How far GPU and adapter may be apart for reads and writes between them without a copy in the host's memory. On a GH200 the
# adapter hangs on the CPU, which is beyond NCCL's usual limit: PHB includes it.
export NCCL_NET_GDR_LEVEL=${NCCL_NET_GDR_LEVEL:-PHB}
# Says what went wrong, and nothing else.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# NCCL_CROSS_NIC is not set: it chooses between adapters, and a node has one here.

xla=(
    # Starts a collective as early and waits for it as late as the program allows, with computation in between: for SCAPE
    # the gather of masks beside the backward pass. On by itself in the pinned versions; here so that it stays on.
    --xla_gpu_enable_latency_hiding_scheduler=true
    # Kernels of collectives go before those of the computation that they run beside, so that a busy GPU does not delay
    # what the other nodes wait for.
    --xla_gpu_enable_highest_priority_async_stream=true
    # --xla_gpu_enable_pipelined_* are not set: they move collectives across the turns of a loop, and the steps here have
    # theirs outside of loops.
)
export XLA_FLAGS="${XLA_FLAGS:-} ${xla[*]}"

# train FLAGS: a new run, or after a requeue, with the same job id, the run that this job began; one log for each task.
train() {
    local code=0
    mkdir -p "$OUT/$SLURM_JOB_ID"
    cd "$OUT/$SLURM_JOB_ID"
    if compgen -G "runs/*/checkpoints/[0-9]*" > /dev/null; then
        set -- --resume
    else
        set -- --config "$CONFIG" --data.source "$DATA" "$@"
    fi
    # --wait: where one task has ended for so many seconds, the others are not waited for.
    srun --wait=300 --open-mode=append --output=task-%t.log "$PYTHON" "$CODE/scripts/pretrain.py" "$@" || code=$?
    # 143: SIGTERM before the time limit, and a checkpoint. A task that was lost ends the others with 75, and srun with the
    # highest code, 128 and the signal that ended it; one that stood still gives 75. Not for ever, if it comes back.
    local lost=$(((code == 75 || (code >= 128 && code != 130)) && ${SLURM_RESTART_COUNT:-0} < 10))
    if [ "$code" = 143 ] || [ "$lost" = 1 ]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$code"
}
