// Prints a job's tokens, each once: go run read_job.go JOB_ID CHANNEL; docs/howto/redis_channels.md says why.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/gomodule/redigo/redis"
)

const silence = 3 * time.Second

type Event struct {
	ID      string `json:"id"`
	Index   *int   `json:"index"`
	Text    string `json:"text"`
	Outcome *struct {
		State string `json:"state"`
	} `json:"outcome"`
}

// Refused is an answer that no repetition changes, such as that for an unknown job.
type Refused struct{ text string }

func (refused Refused) Error() string { return refused.text }

func env(name, otherwise string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return otherwise
}

func get(path string) (*http.Response, error) {
	request, err := http.NewRequest("GET", env("PENSTOCK_URL", "http://127.0.0.1:8000")+path, nil)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Authorization", "Bearer "+env("PENSTOCK_API_KEY", "none"))
	answer, err := http.DefaultClient.Do(request)
	if err != nil || answer.StatusCode == http.StatusOK {
		return answer, err
	}
	defer answer.Body.Close()
	body, _ := io.ReadAll(answer.Body)
	text := fmt.Sprintf("%s: %s %s", path, answer.Status, body)
	if answer.StatusCode < 500 && answer.StatusCode != http.StatusTooManyRequests {
		return nil, Refused{text}
	}
	return nil, fmt.Errorf("%s", text)
}

// logged uses the events after number seen that the job has by now.
func logged(jobID string, seen int, use func(Event)) error {
	answer, err := get("/v1/jobs/" + jobID)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	var job struct {
		NumChunks int `json:"num_chunks"`
	}
	if err := json.NewDecoder(answer.Body).Decode(&job); err != nil || seen >= job.NumChunks-1 {
		return err
	}
	stream, err := get(fmt.Sprintf("/v1/jobs/%s/stream?after=%d", jobID, seen))
	if err != nil {
		return err
	}
	defer stream.Body.Close()
	for lines := bufio.NewReader(stream.Body); seen < job.NumChunks-1; {
		line, err := lines.ReadString('\n')
		if err != nil {
			return err
		}
		var event Event
		if !strings.HasPrefix(line, "data: {") {
			continue
		}
		if err := json.Unmarshal([]byte(line[len("data: "):]), &event); err != nil {
			return err
		}
		if event.Index != nil {
			seen = *event.Index
			use(event)
		}
	}
	return nil
}

func dial(url string) (redis.Conn, error) {
	if strings.HasPrefix(url, "unix://") {
		return redis.Dial("unix", strings.TrimPrefix(url, "unix://"))
	}
	return redis.DialURL(url)
}

// published sends each message, and an empty one after each subscription. It subscribes again until done is closed.
func published(channel string, messages chan<- []byte, done <-chan struct{}) {
	for {
		if connection, err := dial(os.Getenv("REDIS_URL")); err == nil {
			go func() { <-done; connection.Close() }()
			subscription := redis.PubSubConn{Conn: connection}
			for err = subscription.Subscribe(channel); err == nil; {
				var data []byte
				switch message := subscription.Receive().(type) {
				case redis.Message:
					data = message.Data
				case error:
					err = message
					continue
				}
				select {
				case messages <- data:
				case <-done:
					err = io.EOF
				}
			}
			connection.Close()
		}
		select {
		case <-time.After(time.Second):
		case <-done:
			return
		}
	}
}

// Events uses a job's events, each once, in order, to the last one.
func Events(jobID, channel string, use func(Event)) error {
	messages, done := make(chan []byte), make(chan struct{})
	defer close(done)
	go published(channel, messages, done)
	seen, ended := -1, false
	take := func(event Event) {
		seen, ended = *event.Index, event.Outcome != nil
		use(event)
	}
	for !ended {
		var data []byte
		select {
		case data = <-messages:
		case <-time.After(silence):
		}
		var event Event
		isMessage := json.Unmarshal(data, &event) == nil && event.Index != nil
		if isMessage && (event.ID != jobID || *event.Index <= seen) {
			continue
		}
		if isMessage && *event.Index == seen+1 {
			take(event)
			continue
		}
		var refused Refused
		if err := logged(jobID, seen, take); errors.As(err, &refused) {
			return err
		} // No gateway answers: the next message or silence tries again.
	}
	return nil
}

func main() {
	err := Events(os.Args[1], os.Args[2], func(event Event) {
		fmt.Print(event.Text)
		if event.Outcome != nil {
			fmt.Println("\n" + event.Outcome.State)
		}
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
