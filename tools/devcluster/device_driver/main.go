// SPDX-License-Identifier: Apache-2.0

// Command device_driver offers one device on its node to resource claims. There is no hardware behind it: a container that gets the
// device finds its name in the environment, as TEST_DEVICE.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

const (
	driver = "device.test.diffusion-operator.dev"
	device = "test-device"
	// The kind of the devices as the container runtime knows them.
	cdiKind = "test.diffusion-operator.dev/device"
)

// plugin is what the kubelet asks when a pod with a claim comes and goes.
type plugin struct {
	cdiFolder string
	stop      context.CancelFunc
}

func (p plugin) PrepareResourceClaims(_ context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		result := kubeletplugin.PrepareResult{Err: p.write(claim.UID)}
		for _, allocated := range claim.Status.Allocation.Devices.Results {
			if allocated.Driver == driver {
				result.Devices = append(result.Devices, kubeletplugin.Device{
					Requests:     []string{allocated.Request},
					PoolName:     allocated.Pool,
					DeviceName:   allocated.Device,
					CDIDeviceIDs: []string{fmt.Sprintf("%s=%s", cdiKind, claim.UID)},
				})
			}
		}
		results[claim.UID] = result
	}
	return results, nil
}

func (p plugin) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := map[types.UID]error{}
	for _, claim := range claims {
		err := os.Remove(p.file(claim.UID))
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		results[claim.UID] = err
	}
	return results, nil
}

func (p plugin) HandleError(_ context.Context, err error, message string) {
	fmt.Fprintln(os.Stderr, message, err)
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		p.stop()
	}
}

func (p plugin) file(claim types.UID) string {
	return filepath.Join(p.cdiFolder, fmt.Sprintf("test-device-%s.json", claim))
}

// write says what a container gets with the claim, in the format of the Container Device Interface.
func (p plugin) write(claim types.UID) error {
	edits := map[string]any{"env": []string{"TEST_DEVICE=" + device}}
	spec, err := json.Marshal(map[string]any{
		"cdiVersion": "0.6.0",
		"kind":       cdiKind,
		"devices":    []any{map[string]any{"name": string(claim), "containerEdits": edits}},
	})
	if err != nil {
		return err
	}
	return os.WriteFile(p.file(claim), spec, 0o644)
}

func run() error {
	kubeconfig := flag.String("kubeconfig", "", "the file with the API server's address and the account")
	node := flag.String("node", "", "the node that has the device")
	kubelet := flag.String("kubelet", "/var/lib/kubelet", "the kubelet's folder")
	cdiFolder := flag.String("cdi", "/var/run/cdi", "the folder in which the container runtime looks for devices")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	sockets := filepath.Join(*kubelet, "plugins", driver)
	for _, folder := range []string{sockets, *cdiFolder} {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return err
		}
	}
	helper, err := kubeletplugin.Start(ctx, plugin{*cdiFolder, stop},
		kubeletplugin.DriverName(driver),
		kubeletplugin.KubeClient(client),
		kubeletplugin.NodeName(*node),
		kubeletplugin.PluginDataDirectoryPath(sockets),
		kubeletplugin.RegistrarDirectoryPath(filepath.Join(*kubelet, "plugins_registry")),
	)
	if err != nil {
		return err
	}
	defer helper.Stop()
	slice := resourceslice.Slice{Devices: []resourceapi.Device{{Name: device}}}
	pools := map[string]resourceslice.Pool{*node: {Slices: []resourceslice.Slice{slice}}}
	if err := helper.PublishResources(ctx, resourceslice.DriverResources{Pools: pools}); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
