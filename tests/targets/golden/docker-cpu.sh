# executes /runs/demo/logs/docker-DIGEST/job.json, which `mcore-bundle launch docker` writes
# node 0 of 1
docker run \
  --detach \
  --name=mcore-bundle-demo-DIGEST-0 \
  --label=mcore-bundle.owner=1000 \
  --label=mcore-bundle.run-directory=/runs/demo \
  --user=1000:0 \
  --read-only \
  --tmpfs=/tmp:exec,mode=1777 \
  --tmpfs=/home/bundle:exec,mode=1777 \
  --cap-drop=ALL \
  --security-opt=no-new-privileges \
  --shm-size=1g \
  --stop-timeout=300 \
  --volume=/work:/work \
  --volume=/runs/demo:/runs/demo \
  --volume=/data:/data \
  --workdir=/work \
  --env=HF_TOKEN bundle train \
  --job=/runs/demo/logs/docker-DIGEST/job.json
