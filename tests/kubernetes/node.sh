#!/bin/bash
# node.sh DIR BIN NUMBER : a node of the cluster of up.sh: containerd and a kubelet, with a file system of its own on DIR/nodeNUMBER/disk.img and /run in
# memory. Run it in a mount and PID namespace of its own: to kill its first process is to cut the node's power; started again, it has its disk.
# Images are DIR/images/*.tar, logs DIR/log/*NUMBER.
set -eu
dir=$1; bin=$2; n=$3; ip=10.77.0.1; d=$dir/node$n; disk=$d/disk
mount -t proc proc /proc
mkdir -p "$disk"
[ -e "$d/disk.img" ] || { truncate -s 24G "$d/disk.img.new"; mkfs.ext4 -q -m 0 "$d/disk.img.new"; mv "$d/disk.img.new" "$d/disk.img"; }
mount -o loop "$d/disk.img" "$disk"
mount --make-rshared /
mount -t tmpfs tmpfs /run
for place in /var/lib/kubelet /var/lib/bdn /var/lib/cni /var/log /srv/mirror; do mkdir -p "$place" "$disk$place"; mount --bind "$disk$place" "$place"; done
chown 999:999 /srv/mirror
mkdir -p /run/cni
cat > /run/cni/10-bridge.conflist <<C
{"cniVersion": "0.4.0", "name": "rig", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.78.0.0/24", "rangeStart": "10.78.0.$((n * 110 - 90))", "rangeEnd": "10.78.0.$((n * 110 + 10))"}]],
            "routes": [{"dst": "0.0.0.0/0"}]}}]}
C
cat > /run/containerd.toml <<C
version = 2
root = "$disk/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd.sock"
[ttrpc]
  address = "/run/containerd.sock.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/busybox:1"
  restrict_oom_score_adj = true  # root has no CAP_SYS_RESOURCE everywhere
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/run/cni"
C
containerd -c /run/containerd.toml -l warn >>"$dir/log/containerd$n" 2>&1 &
for _ in $(seq 200); do ctr -a /run/containerd.sock version >/dev/null 2>&1 && break; sleep .1; done
for image in "$dir"/images/*.tar; do
    [ -e "$disk/${image##*/}.there" ] || ctr -a /run/containerd.sock -n k8s.io images import "$image" >/dev/null
    touch "$disk/${image##*/}.there"
done
"$bin/kubelet" --kubeconfig="$dir/kubeconfig" --hostname-override="node$n" --node-ip=$ip --port=$((10250 + n * 10)) --healthz-port=$((10258 + n * 10)) --v=1 \
    --container-runtime=remote --container-runtime-endpoint=unix:///run/containerd.sock --cgroup-driver=cgroupfs --cgroups-per-qos=false --enforce-node-allocatable= \
    --feature-gates=CSIServiceAccountToken=true --fail-swap-on=false --authentication-token-webhook=false --anonymous-auth=true --authorization-mode=AlwaysAllow --address=$ip \
    --read-only-port=0 --oom-score-adj=0 --eviction-hard= --image-gc-high-threshold=100 >>"$dir/log/kubelet$n" 2>&1 &
wait -n  # the first that ends ends the node
