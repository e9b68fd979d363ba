# executes /runs/demo/logs/local-1/job.json, which `mcore-bundle launch local` writes
# node 0 of 1
/venv/bin/python -m bundle train \
  --job=/runs/demo/logs/local-1/job.json \
  --mcore=/src/Megatron-LM
# which starts its ranks by
env CPU_AFFINITY_CONF=1 CUDA_DEVICE_MAX_CONNECTIONS=1 GLOO_SOCKET_IFNAME=lo HCCL_CONNECT_TIMEOUT=1800 HCCL_EVENT_TIMEOUT=3660 HCCL_EXEC_TIMEOUT=3600 OMP_NUM_THREADS=8 PET_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 /venv/bin/python -m torch.distributed.run \
  --nnodes=1 \
  --nproc-per-node=4 \
  --rdzv-backend=c10d \
  --rdzv-conf=store_type=file \
  --local-addr=127.0.0.1 \
  --rdzv-id=ranks \
  --max-restarts=0 \
  --monitor-interval=0.1 \
  --log-dir=/runs/demo/logs/node-0/1 \
  --redirects=0:2,1:3,2:3,3:3 -m bundle train \
  --job=/runs/demo/logs/node-0/1/job.json
