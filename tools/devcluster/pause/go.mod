module diffusion-operator.dev/tools/devcluster/pause

go 1.26.0
