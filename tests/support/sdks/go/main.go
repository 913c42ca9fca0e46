// SPDX-License-Identifier: Apache-2.0

// Makes one call with OpenAI's SDK for Go and prints the error that it returned as a line of JSON.
//
// Standard input is {"baseURL", "apiKey", "maxRetries", "headers", "body", "cancel"}. With `cancel`, the request of that id is
// cancelled at the first event of its stream.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/ssestream"
)

type call struct {
	BaseURL, APIKey string
	MaxRetries      int
	Headers         map[string]string
	Body            map[string]any
	Cancel          string
}

func main() {
	var given call
	if err := json.NewDecoder(os.Stdin).Decode(&given); err != nil {
		log.Fatal(err)
	}
	options := []option.RequestOption{
		option.WithBaseURL(given.BaseURL), option.WithAPIKey(given.APIKey), option.WithMaxRetries(given.MaxRetries),
		option.WithRequestTimeout(time.Minute),
	}
	client := openai.NewClient(options...)
	var ofCall []option.RequestOption
	for name, value := range given.Headers {
		ofCall = append(ofCall, option.WithHeader(name, value))
	}
	for field, value := range given.Body {
		ofCall = append(ofCall, option.WithJSONSet(field, value))
	}
	images, err := generate(client, given, ofCall)
	answer, _ := json.Marshal(described(err, images))
	fmt.Println(string(answer))
}

// Makes the call and returns the number of images.
func generate(client openai.Client, given call, options []option.RequestOption) (int, error) {
	ctx := context.Background()
	if given.Body["stream"] != true {
		answer, err := client.Images.Generate(ctx, openai.ImageGenerateParams{}, options...)
		if err != nil {
			return 0, err
		}
		return len(answer.Data), nil
	}
	stream, images, first := client.Images.GenerateStreaming(ctx, openai.ImageGenerateParams{}, options...), 0, true
	for stream.Next() {
		if first && given.Cancel != "" {
			if err := client.Delete(ctx, "requests/"+given.Cancel, nil, nil); err != nil {
				log.Fatal(err)
			}
		}
		first = false
		if stream.Current().Type == "image_generation.completed" {
			images++
		}
	}
	return images, stream.Err()
}

// Returns what a user of the SDK reads of an error.
func described(err error, images int) map[string]any {
	var answered *openai.Error
	var streamed *ssestream.StreamError
	switch {
	case errors.As(err, &answered):
		return map[string]any{
			"raised": "openai.Error", "message": answered.Message, "status": answered.StatusCode, "code": answered.Code,
			"type": answered.Type, "param": nullable(answered.Param), "requestID": answered.Response.Header.Get("X-Request-ID"),
		}
	case errors.As(err, &streamed):
		event := struct{ Error map[string]any }{}
		if err := json.Unmarshal(streamed.Event.Data, &event); err != nil {
			log.Fatal(err)
		}
		event.Error["raised"] = "ssestream.StreamError"
		return event.Error
	case err != nil:
		log.Fatal(err)
	}
	return map[string]any{"raised": nil, "images": images}
}

// The SDK has an empty text where the answer has null.
func nullable(text string) any {
	if text == "" {
		return nil
	}
	return text
}
