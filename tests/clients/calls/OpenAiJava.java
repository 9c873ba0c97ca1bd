// OpenAI's own Java client: a chat, a stream, a response, vectors, and an error.
import com.openai.client.OpenAIClient;
import com.openai.client.okhttp.OpenAIOkHttpClient;
import com.openai.core.http.StreamResponse;
import com.openai.errors.BadRequestException;
import com.openai.models.chat.completions.ChatCompletion;
import com.openai.models.chat.completions.ChatCompletionChunk;
import com.openai.models.chat.completions.ChatCompletionCreateParams;
import com.openai.models.embeddings.EmbeddingCreateParams;
import com.openai.models.responses.Response;
import com.openai.models.responses.ResponseCreateParams;

public class OpenAiJava {
    public static void main(String[] words) {
        OpenAIClient client = OpenAIOkHttpClient.builder()
                .baseUrl(words[0] + "/v1").apiKey("x").maxRetries(0).build();
        ChatCompletionCreateParams asked = chat("Hello");
        ChatCompletion whole = client.chat().completions().create(asked);
        String text = whole.validate().choices().get(0).message().content().get();
        StringBuilder streamed = new StringBuilder();
        try (StreamResponse<ChatCompletionChunk> reading =
                client.chat().completions().createStreaming(asked)) {
            reading.stream().flatMap(chunk -> chunk.validate().choices().stream())
                    .forEach(choice -> choice.delta().content().ifPresent(streamed::append));
        }
        check(streamed.toString().equals(text), streamed + " / " + text);
        Response made = client.responses().create(ResponseCreateParams.builder()
                .model("sim").input("Hello").maxOutputTokens(16).build());
        check(!made.output().isEmpty(), "no output");
        check(client.embeddings().create(EmbeddingCreateParams.builder()
                .model("hash").input("Hello").build()).data().size() == 1, "no vector");
        try {
            client.chat().completions().create(chat("word ".repeat(9_000)));
            check(false, "a prompt that is too long is an error");
        } catch (BadRequestException error) {
            check(error.code().get().equals("context_length_exceeded"), error.getMessage());
        }
        client.close();
    }

    static ChatCompletionCreateParams chat(String text) {
        return ChatCompletionCreateParams.builder()
                .model("sim").addUserMessage(text).maxCompletionTokens(4).temperature(0).build();
    }

    static void check(boolean holds, String message) {
        if (!holds) {
            throw new IllegalStateException(message);
        }
    }
}
