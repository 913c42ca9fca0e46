// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	cri "k8s.io/cri-client/pkg"
)

// newPullCommand pulls an image the way the kubelet does. containerd's own client would keep every packed layer beside the
// unpacked one, which for an image with torch is gigabytes.
func newPullCommand() *cobra.Command {
	var endpoint string
	command := &cobra.Command{
		Use:          "cri-pull IMAGE",
		Args:         cobra.ExactArgs(1),
		SilenceUsage: true,
		RunE: func(_ *cobra.Command, args []string) error {
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute)
			defer cancel()
			images, err := cri.NewRemoteImageService(ctx, endpoint, 20*time.Minute, nil, false)
			if err != nil {
				return fmt.Errorf("no answer from the runtime at %s: %w", endpoint, err)
			}
			reference, err := images.PullImage(ctx, &runtimeapi.ImageSpec{Image: args[0]}, nil, nil)
			if err != nil {
				return fmt.Errorf("cannot pull %s: %w", args[0], err)
			}
			fmt.Println(reference)
			return nil
		},
	}
	command.Flags().StringVar(&endpoint, "endpoint", "", "the runtime's socket, as unix:///PATH")
	return command
}
