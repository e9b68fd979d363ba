"""The environments that each starter sets, as it sets them."""

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29511",
    "TORCHELASTIC_RUN_ID": "none",
}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
    "JOB_COMPLETION_INDEX": "1",
}
# srun --ntasks-per-node=1 on two nodes
SLURM_NODE = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "gpu[007-008,10],login1",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NNODES": "3",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}
SLURM_RANK = SLURM_NODE | {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
}
SLURM_BATCH = {
    "SLURM_JOB_ID": "77",
    "SLURM_NNODES": "1",
    "SLURM_JOB_NODELIST": "gpu7",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_TASKS_PER_NODE": "1",
}
# The Ascend operator counts nodes in RANK and devices in WORLD_SIZE.
ASCEND = {
    "RANK": "1",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "LOCAL_RANK": "0,1,2,3,4,5,6,7",
    "MASTER_ADDR": "10.0.0.9",
    "MASTER_PORT": "2222",
}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "3"}
