# executes /runs/demo/logs/local-1/job.json, which `mcore-bundle launch local` writes
# node 0 of 2
/venv/bin/python -m bundle train \
  --job=/runs/demo/logs/local-1/job.json \
  --restarts=3 \
  --nodes=2 \
  --node-rank=0 \
  --rendezvous=node0:29500
# which starts its ranks by
env CUDA_DEVICE_MAX_CONNECTIONS=8 NVTE_USE_CUTLASS_GROUPED_GEMM=1 OMP_NUM_THREADS=8 PET_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT TORCH_DEVICE_BACKEND_AUTOLOAD=0 /venv/bin/python -m torch.distributed.run \
  --nnodes=2 \
  --nproc-per-node=8 \
  --rdzv-backend=static \
  --rdzv-endpoint=node0:29500 \
  --node-rank=0 \
  --rdzv-conf=timeout=3600 \
  --rdzv-id=ranks \
  --max-restarts=0 \
  --monitor-interval=0.1 \
  --log-dir=/runs/demo/logs/node-0/1 \
  --redirects=0:2,1:3,2:3,3:3,4:3,5:3,6:3,7:3 -m bundle train \
  --job=/runs/demo/logs/node-0/1/job.json
# node 1 of 2
/venv/bin/python -m bundle train \
  --job=/runs/demo/logs/local-1/job.json \
  --restarts=3 \
  --nodes=2 \
  --node-rank=1 \
  --rendezvous=node0:29500
# which starts its ranks by
env CUDA_DEVICE_MAX_CONNECTIONS=8 NVTE_USE_CUTLASS_GROUPED_GEMM=1 OMP_NUM_THREADS=8 PET_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT TORCH_DEVICE_BACKEND_AUTOLOAD=0 /venv/bin/python -m torch.distributed.run \
  --nnodes=2 \
  --nproc-per-node=8 \
  --rdzv-backend=static \
  --rdzv-endpoint=node0:29500 \
  --node-rank=1 \
  --rdzv-conf=timeout=3600 \
  --rdzv-id=ranks \
  --max-restarts=0 \
  --monitor-interval=0.1 \
  --log-dir=/runs/demo/logs/node-1/1 \
  --redirects=0:2,1:3,2:3,3:3,4:3,5:3,6:3,7:3 -m bundle train \
  --job=/runs/demo/logs/node-1/1/job.json
