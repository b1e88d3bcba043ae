/** Prints the embedding of a sentence: java -Djava.library.path=FOLDER Embed model.coda 101 7592 2088 102. */
public final class Embed {
  static {
    System.loadLibrary("coda_embed");
  }

  private Embed() {}

  /** The mean over the tokens of what the encoder in file {@code path} gives for each; throws IllegalStateException. */
  public static native float[] embed(String path, long[] tokens);

  public static void main(String[] words) {
    long[] tokens = new long[words.length - 1];
    for (int i = 0; i < tokens.length; i++) tokens[i] = Long.parseLong(words[i + 1]);
    for (float value : embed(words[0], tokens)) System.out.printf(java.util.Locale.ROOT, "%.6f%n", value);
  }
}
